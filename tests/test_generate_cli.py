"""`transformer2 generate`."""

import functools
import io
import json
import re

import pytest
import torch
from training_tools import IDENTITY_DDL, IDENTITY_SHORT_SWA, checkpoint, command, word_tokenizer, words
from transformers import AutoModelForCausalLM, CompileConfig, GPT2Config, GPT2LMHeadModel

from transformer2.errors import MachineError, UserError
from transformer2.training import generate, generation
from transformer2.training.generation import Generator


@pytest.fixture
def model(tmp_path):
    return checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, dtype=torch.float32, noise=0.3)


class Recorder(io.StringIO):
    """Remembers what was written when."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def write(self, text: str) -> int:
        self.parts.append(text)
        return super().write(text)


def test_tokens_are_streamed_one_by_one_and_are_those_of_generate(model):
    prompt, tokenizer, out = words(6), word_tokenizer(), Recorder()
    text = generate(model, prompt, file=out, max_new_tokens=8)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model)
    expected = network.generate(ids, max_new_tokens=8, do_sample=False)[0, 6:]
    assert text == tokenizer.decode(expected, skip_special_tokens=True)
    assert out.getvalue().strip() == text
    assert len([part for part in out.parts if part.strip()]) > 4
    assert prompt not in out.getvalue()


def test_sampling_follows_its_seed(model):
    draw = [generate(model, words(6), max_new_tokens=12, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    greedy = generate(model, words(6), max_new_tokens=12)
    assert generate(model, words(6), max_new_tokens=12, temperature=2.0, top_p=1e-6, seed=1) == greedy


def test_chat_uses_the_format_of_the_checkpoint(model):
    with pytest.raises(UserError, match="no chat format"):
        generate(model, "w3", chat=True)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}w10 {{ m.content }} w11{% endfor %}{% if add_generation_prompt %} w12{% endif %}"
    )
    tokenizer.save_pretrained(model)
    assert generate(model, "w3 w4", chat=True, max_new_tokens=5) == generate(
        model, "w10 w3 w4 w11 w12", max_new_tokens=5
    )


def test_the_command_writes_the_text_alone_to_standard_output(model, monkeypatch, capsys):
    code, out, error = command(monkeypatch, capsys, "generate", model, words(6), "--max-new-tokens", 8)
    assert code == 0, error
    text = generate(model, words(6), max_new_tokens=8)
    assert out.strip() == text
    code, out, _ = command(monkeypatch, capsys, "generate", model, words(6), "--max-new-tokens", 8, "--json")
    made = json.loads(out)
    assert (code, made["prompt"], made["text"]) == (0, words(6), text)
    assert (made["prompt_tokens"], made["new_tokens"]) == (6, 8)
    assert made["tokens_per_second"] == pytest.approx(7 / (made["seconds"] - made["first_token_seconds"]))
    for arguments, message in (
        (["--max-new-tokens", 0], "must be at least 1"),
        (["--temperature", 0], "temperature must be at least 0.0001, got 0"),
        (["--temperature", 1e-300], "temperature must be at least 0.0001, got 1e-300"),
        (["--temperature", "nan"], "temperature must be at least 0.0001, got nan"),
        (["--temperature", 0.5, "--no-do-sample"], "Without sampling, temperature, top-p and top-k mean nothing"),
        (["--seed", -1], "seed must lie between 0 and 2^32 - 1, got -1"),
        (["--seed", 2**32], "seed must lie between 0 and"),
        (["--dtype", "float8"], "Unknown dtype"),
        (["--chat"], "no chat format"),
        (["--system", "w3"], "add --chat"),
        (["--top-k", 0], "Top-k must be at least 1"),
        (["--device", "moon"], "There is no device 'moon'"),
        (["--device", "meta"], "holds no numbers"),
        (["--attn", "magic"], "Unknown attention backend 'magic'; choose one of: eager, sdpa"),
    ):
        code, out, error = command(monkeypatch, capsys, "generate", model, words(6), *arguments)
        assert (code, out) == (2, "")
        assert message in error
    assert command(monkeypatch, capsys, "generate", model, "")[0] == 2


def test_the_speed_is_told_on_standard_error(model, monkeypatch, capsys):
    code, out, error = command(monkeypatch, capsys, "generate", model, words(6), "--max-new-tokens", 8)
    assert code == 0
    assert re.search(r"\[8 tokens in [\d.]+ s: the first after [\d.]+ s, then [\d.]+ tokens/s\]", error)
    assert "tokens/s" not in out


def test_the_prompt_may_come_from_standard_input(model, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(words(6)))
    _, out, _ = command(monkeypatch, capsys, "generate", model, "-", "--max-new-tokens", 8)
    assert out.strip() == generate(model, words(6), max_new_tokens=8)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_backends(model, attention):
    generator = Generator(model, attention=attention, device="cpu", dtype="float32")
    assert generator.network.config._attn_implementation == attention
    made = generator.write(generator.encode(words(6)), max_new_tokens=8)
    assert made.text == generate(model, words(6), max_new_tokens=8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_backends_that_are_not_here(model, attention):
    with pytest.raises(MachineError, match=attention):
        Generator(model, attention=attention)


def test_compiled_decoding_gives_the_same_text(model, monkeypatch):
    """Here through a backend that runs the graphs as they are; the C++ of inductor takes a minute."""
    graphs = []

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(generation, "CompileConfig", functools.partial(CompileConfig, backend=run_as_it_is))
    torch._dynamo.reset()
    made = Generator(model, compiled=True)
    text = made.write(made.encode(words(6)), max_new_tokens=8).text
    assert text == generate(model, words(6), max_new_tokens=8)
    assert graphs


def test_a_prompt_that_is_longer_than_the_context(model):
    generator = Generator(model)
    with pytest.raises(UserError, match="prompt has 300 tokens, and the model's context is 256"):
        generator.write(generator.encode(words(300)))
    made = generator.write(generator.encode(words(250)), max_new_tokens=20)
    assert made.new_tokens <= 6


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    """Of other model types the library makes up an empty tokenizer."""
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=1)).save_pretrained(folder)
    with pytest.raises(UserError, match="no usable tokenizer"):
        generate(folder, "hello")
