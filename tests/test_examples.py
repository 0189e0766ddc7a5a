"""Prompts with completions, chats and ready tokens: what is learned, what is refused, packing and streams."""

import json

import datasets
import numpy as np
import pytest
import torch
from training_tools import byte_tokenizer, checkpoint, command, documents, run_settings, word_tokenizer, words

from transformer2.errors import UserError
from transformer2.training import train
from transformer2.training.examples import encode_examples
from transformer2.training.packing import PackedText, best_fit
from transformer2.training.rows import load_rows
from transformer2.training.settings import load_settings

# As ChatML, once without and once with blocks that mark what the assistant said.
TURN = "<|{{ m.role }}|>{{ m.content }}<eos>"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else '...' }}")
CHAT = [
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2é"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "3"},
]


def chat_tokenizer(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def learned(text: PackedText, tokenizer) -> str:
    return tokenizer.decode(text.tokens[text.is_target])


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_chat_the_assistant_is_learned_with_the_end_of_its_turns(template):
    tokenizer = chat_tokenizer(template)
    text = encode_examples([{"messages": CHAT}, {"messages": CHAT[:2]}], "chat", tokenizer, "x")
    assert learned(text, tokenizer) == "2é<eos>3<eos>2é<eos>"
    assert text.num_bytes[: text.lengths[0]].sum() == len(tokenizer.apply_chat_template(CHAT, tokenize=False).encode())
    assert not text.plain.any()


def test_templates_that_rewrite_earlier_turns_or_say_nothing_are_refused():
    with pytest.raises(UserError, match="Example 1 of x: the chat template changes earlier turns when message 2"):
        encode_examples([{"messages": CHAT}], "chat", chat_tokenizer(FORGETFUL), "x")
    with pytest.raises(UserError, match="Example 2 of x: nothing in it was said by the assistant"):
        encode_examples([{"messages": CHAT}, {"messages": CHAT[:1]}], "chat", chat_tokenizer(PLAIN), "x")
    with pytest.raises(UserError, match="cannot render it"):
        encode_examples([{"messages": CHAT}], "chat", chat_tokenizer("{{ raise_exception('no') }}"), "x")


def test_of_a_prompt_nothing_is_learned_and_the_end_is():
    tokenizer = byte_tokenizer()
    text = encode_examples([{"prompt": "1+1=", "completion": "2"}], "prompt_completion", tokenizer, "x")
    assert learned(text, tokenizer) == "2<eos>"
    assert tokenizer.decode(text.tokens) == "1+1=2<eos>"
    assert text.num_bytes.sum() == 1
    assert text.with_end(0).tokens.tolist() == text.tokens.tolist()  # ended already
    turns = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    tokenizer = chat_tokenizer(PLAIN)
    assert learned(encode_examples([turns], "prompt_completion", tokenizer, "x"), tokenizer) == "3<eos>"


def test_a_padding_token_that_ends_texts_is_still_learned(tmp_path):
    """Masks come from positions: pad = eos must not stop the model from learning where to stop."""
    tokenizer = word_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    file = write(tmp_path / "a.jsonl", [{"prompt": "w3", "completion": "w4 w5"}, {"prompt": "w6", "completion": "w7"}])
    rows, _ = load_rows(load_settings(run_settings(tmp_path, tmp_path / "out", file)), tokenizer)
    row = rows[0]
    assert row.labels[row.labels != -100].tolist() == [4, 5, 1, 7, 1]


def test_ready_tokens_keep_their_labels():
    rows = [{"input_ids": [3, 4, 5], "labels": [-100, 4, -100]}, {"input_ids": [6, 7]}]
    text = encode_examples(rows, "tokens", word_tokenizer(), "x")
    assert text.is_target.tolist() == [False, True, False, True, True]
    for bad, reason in (
        ({"input_ids": [3, 4], "labels": [4, -100]}, "a label must be the token of its own place"),
        ({"input_ids": [3, 4], "labels": [3]}, "as long as input_ids"),
        ({"input_ids": [3, 400]}, "token 400 is not among the 101"),
        ({"input_ids": "abc"}, "must be a list of token numbers"),
    ):
        with pytest.raises(UserError, match=reason):
            encode_examples([bad], "tokens", word_tokenizer(), "x")


def test_the_kind_is_read_from_the_columns(tmp_path):
    settings = run_settings(tmp_path, tmp_path / "out", tmp_path / "a.jsonl")
    for rows, targets in (
        ([{"text": "w3 w4"}], [4, 1]),
        ([{"prompt": "w3", "completion": "w4"}], [4, 1]),
        ([{"input_ids": [3, 4]}], [4]),
    ):
        write(tmp_path / "a.jsonl", rows)
        row = load_rows(load_settings(settings), word_tokenizer())[0][0]
        assert row.labels[row.labels != -100].tolist() == targets
    write(tmp_path / "a.jsonl", [{"text": "w3", "input_ids": [3, 4]}])
    with pytest.raises(UserError, match="could be read as tokens or as text .* say which as data.kind"):
        load_rows(load_settings(settings), word_tokenizer())
    settings["data"]["kind"] = "tokens"
    assert load_rows(load_settings(settings), word_tokenizer())[0].text.tokens.tolist() == [3, 4]
    settings["data"]["kind"] = "chat"
    with pytest.raises(UserError, match="lacks messages"):
        load_rows(load_settings(settings), word_tokenizer())
    settings["data"]["kind"] = None
    write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    with pytest.raises(UserError, match="the tokenizer has no chat template: give one as data.chat_template"):
        load_rows(load_settings(settings), byte_tokenizer())
    (tmp_path / "template.jinja").write_text(PLAIN)
    settings["data"] |= {"chat_template": str(tmp_path / "template.jinja"), "sequence_length": 64}
    assert load_rows(load_settings(settings), byte_tokenizer())[0][0].num_targets == 6


def test_examples_without_targets_are_dropped_and_counted_and_none_is_an_error(tmp_path):
    file = tmp_path / "a.jsonl"
    settings = run_settings(tmp_path, tmp_path / "out", file)  # rows of 16
    late, good = {"prompt": words(20), "completion": "w9"}, {"prompt": words(3), "completion": words(30)}
    write(file, [late, good, late])
    rows, _ = load_rows(load_settings(settings), word_tokenizer())
    assert (len(rows), rows.dropped, rows.truncated) == (1, 2, 3)
    assert rows[0].num_targets == 13
    write(file, [late])
    with pytest.raises(UserError, match="nothing to predict"):
        load_rows(load_settings(settings), word_tokenizer())


def test_best_fit_packs_as_tightly_as_can_be_and_cuts_nothing():
    lengths = np.array([7, 3, 5, 5, 4, 6, 10, 2, 8])
    row = best_fit(lengths, 10)
    assert np.bincount(row, weights=lengths).tolist() == [10.0] * 5  # 50 tokens in five full rows
    random = np.random.default_rng(0).integers(1, 40, 3000)
    filled = np.bincount(best_fit(random, 64), weights=random)
    assert filled.max() <= 64
    assert len(filled) <= 1.005 * random.sum() / 64
    text = PackedText(np.arange(1, 46, dtype=np.int32), [7, 20, 5, 3, 10])
    rows = list(text.rows(10, "best_fit"))
    assert [row.input_ids.tolist() for row in rows] == [
        list(range(8, 18)),
        list(range(18, 28)),
        list(range(36, 46)),
        [*range(1, 8), 33, 34, 35],
        list(range(28, 33)),
    ]
    assert rows[3].position_ids.tolist() == [*range(7), 0, 1, 2]
    assert rows[3].labels.tolist() == [-100, *range(2, 8), -100, 34, 35]


def test_a_stream_is_the_same_at_any_step_and_has_every_example_once_an_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr("transformer2.training.rows.EXAMPLES_AT_ONCE", 5)
    texts = documents([5, 9, 3, 15, 12, 7, 18, 2, 4, 11, 6, 6]).split("|")
    file = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    settings = run_settings(tmp_path, tmp_path / "out", file)
    settings["data"]["streaming"] = True
    tokenizer = word_tokenizer()
    rows, held_out = load_rows(load_settings(settings), tokenizer)
    assert held_out is None
    steps = [rows.for_step(step, 3, seed=1) for step in range(8)]
    again = load_rows(load_settings(settings), tokenizer)[0]
    for step in (5, 2, 7):  # ahead, and back
        for a, b in zip(again.for_step(step, 3, seed=1), steps[step], strict=True):
            assert a.input_ids.tolist() == b.input_ids.tolist()
    epoch = sum(len(rows) for rows in again._blocks())
    seen = [token for row in sum(steps, [])[:epoch] for token in row.input_ids.tolist()]
    assert sorted(seen) == sorted(tokenizer(" ".join(texts))["input_ids"] + [1] * len(texts))
    assert rows.for_step(0, 3, seed=2)[0].input_ids.tolist() != steps[0][0].input_ids.tolist()
    settings["data"]["eval_tokens"] = 5
    with pytest.raises(UserError, match="Nothing can be held out of a stream"):
        load_rows(load_settings(settings), tokenizer)


def test_training_on_chats_and_on_a_stream(tmp_path):
    model = checkpoint(tmp_path / "model", dtype=torch.float32, vocab_size=257)
    byte_tokenizer().save_pretrained(model)
    file = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 6)
    (tmp_path / "template.jinja").write_text(PLAIN)
    settings = run_settings(model, tmp_path / "out", file, steps=2)
    settings["data"] |= {"chat_template": str(tmp_path / "template.jinja"), "sequence_length": 128, "streaming": True}
    report = train(settings)
    assert report["rows"] is None
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == PLAIN


def test_the_commands_show_what_is_learned(tmp_path, monkeypatch, capsys):
    model = checkpoint(tmp_path / "model")
    file = write(
        tmp_path / "a.jsonl", [{"prompt": "w3 w4", "completion": "w5 w6"}, {"prompt": "w7", "completion": "w8"}]
    )
    (tmp_path / "run.yaml").write_text(json.dumps(run_settings(model, tmp_path / "out", file)))
    code, out, error = command(monkeypatch, capsys, "data", "preview", tmp_path / "run.yaml", "--rows", 1)
    assert code == 0, error
    assert out == "--- row 1\nw3 w4[[w5 w6 <eos>]]\n--- next document\nw7[[w8 <eos>]]\n"
    code, out, _ = command(monkeypatch, capsys, "data", "stats", tmp_path / "run.yaml", "--json")
    stats = json.loads(out)
    assert stats["held_out"] is None
    expected = {"documents": 2, "tokens": 8, "targets": 5, "rows": 1, "dropped": 0, "truncated": 0, "cut": 0}
    assert stats["train"] == {
        **expected,
        **{"shortest": 3, "median": 4, "longest": 5, "fill": 0.5, "steps_per_epoch": 0.25, "epochs": 16},
    }
    code, out, error = command(monkeypatch, capsys, "data", "stats", tmp_path / "run.yaml", "data.kind=chat")
    assert (code, out) == (2, "")
    assert "lacks messages" in error
