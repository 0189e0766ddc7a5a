"""Perplexity, bits per byte and the distance to a base, against independent computations."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_tools import (
    IDENTITY_DDL,
    byte_tokenizer,
    checkpoint,
    command,
    documents,
    word_tokenizer,
)
from transformers import LlamaForCausalLM

from transformer2.errors import CheckFailed, UserError
from transformer2.training import evaluate


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(documents([20, 9, 31]))
    return file


@pytest.fixture
def llama(tmp_path):
    return checkpoint(tmp_path / "llama", None, dtype=torch.float32)


def reference(folder, pieces: list[str]) -> tuple[int, float, list[torch.Tensor]]:
    """Targets, nats and log-probabilities of each piece alone, by a stock Llama."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder).eval(), word_tokenizer()
    targets, nats, log_p = 0, 0.0, []
    for piece in pieces:
        ids = torch.tensor([tokenizer(piece)["input_ids"]])
        if ids.shape[1] > 1:
            with torch.no_grad():
                log_p.append(model(ids).logits[0, :-1].double().log_softmax(-1))
            targets += ids.shape[1] - 1
            nats -= log_p[-1].gather(-1, ids[0, 1:, None]).sum().item()
    return targets, nats, log_p


def test_perplexity_is_that_of_a_stock_llama_on_each_piece_alone(llama, text):
    flat = [document.split() for document in documents([20, 9, 31]).split("|")]
    pieces = [flat[0][:16], flat[0][16:], flat[1], flat[2][:3], flat[2][3:19], flat[2][19:]]  # what rows of 16 make
    targets, nats, _ = reference(llama, [" ".join(piece) for piece in pieces])
    scores = evaluate(llama, text, sequence_length=16, separator="|", rows_per_batch=3)
    assert scores["documents"] == 3
    assert scores["tokens"] == targets == 60 - 6
    assert scores["nll"] == pytest.approx(nats / targets, rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    # the first word of a piece is not scored, and every other one counts with the space before it
    num_bytes = sum(len(" ".join(piece)) - len(piece[0]) for piece in pieces)
    assert scores["bytes"] == num_bytes
    assert scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert scores["dtype"] == "float32"
    assert scores["tokens_per_second"] == pytest.approx(scores["tokens"] / scores["seconds"])


def test_only_the_beginning_is_scored_where_asked(llama, text):
    targets, nats, _ = reference(llama, [" ".join(documents([20]).split()[:12])])
    scores = evaluate(llama, text, max_tokens=12, separator="|")
    assert (scores["tokens"], scores["sequence_length"]) == (targets, 256)
    assert scores["nll"] == pytest.approx(nats / targets, rel=1e-5)


def test_bytes_of_characters_beyond_ascii_are_counted_once(tmp_path):
    model = checkpoint(tmp_path / "model", None, dtype=torch.float32, vocab_size=257)
    byte_tokenizer().save_pretrained(model)
    text = "é𝄞 und so weiter: €"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    scores = evaluate(model, tmp_path / "text.txt")
    assert scores["tokens"] == len(text.encode()) - 1
    assert scores["bytes"] == len(text.encode()) - 2  # the first token, which is not scored, stands for "é"


def test_an_identity_retrofit_is_no_distance_from_its_base(tmp_path, text, llama):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    weights = load_file(model / "model.safetensors")
    weights.update(load_file(llama / "model.safetensors"))
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    scores = evaluate(model, text, against=llama, sequence_length=16, separator="|")
    assert scores["base"] == {name: scores[name] for name in ("nll", "perplexity", "bits_per_byte")}
    assert scores["kl"] == 0
    assert scores["top1_agreement"] == 1


def test_the_distance_to_another_model(tmp_path, text, llama):
    other = checkpoint(tmp_path / "other", None, dtype=torch.float32, seed=1)
    scores = evaluate(other, text, against=llama, separator="|", sequence_length=64)
    pieces = documents([20, 9, 31]).split("|")
    targets, nats, log_p = reference(other, pieces)
    _, base_nats, base_log_p = reference(llama, pieces)
    p, q = torch.cat(base_log_p), torch.cat(log_p)
    assert scores["tokens"] == len(p) == targets
    assert scores["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    assert scores["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert scores["base"]["nll"] == pytest.approx(base_nats / targets, rel=1e-5)
    assert scores["nll"] == pytest.approx(nats / targets, rel=1e-5)


def test_the_command_prints_a_table_or_json(llama, text, monkeypatch, capsys):
    arguments = ["eval", llama, "--text", text, "--sequence-length", 16, "--separator", "|", "--against", llama]
    code, out, error = command(monkeypatch, capsys, *arguments, "--json")
    assert code == 0, error
    scores, again = json.loads(out), evaluate(llama, text, sequence_length=16, separator="|")
    assert scores["perplexity"] == pytest.approx(again["perplexity"], rel=1e-6)
    code, out, _ = command(monkeypatch, capsys, *arguments, "--dtype", "bfloat16", "--max-tokens", "30")
    assert code == 0
    assert "bfloat16" in out.splitlines()[0]
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["model", "base", "KL(base"]
    assert "same first choice 100.00%" in out


def test_bad_input_is_refused(tmp_path, llama, text, monkeypatch, capsys):
    code, out, error = command(monkeypatch, capsys, "eval", llama, "--text", tmp_path / "none.txt")
    assert (code, out) == (2, "")
    assert "No such file" in error
    assert command(monkeypatch, capsys, "eval", tmp_path / "none", "--text", text)[0] == 2
    with pytest.raises(UserError, match="must be at least 2, got 0"):
        evaluate(llama, text, sequence_length=0)
    with pytest.raises(UserError, match="Unknown dtype 'int8'"):
        evaluate(llama, text, dtype="int8")
    other = checkpoint(tmp_path / "other", None, vocab_size=257)
    byte_tokenizer().save_pretrained(other)
    with pytest.raises(UserError, match="different tokenizers"):
        evaluate(llama, text, against=other)
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckFailed, match="not finite"):
        evaluate(llama, text)
