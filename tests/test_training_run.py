"""Training runs from settings to checkpoint folder."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from training_tools import (
    IDENTITY_DDL,
    IDENTITY_SHORT_SWA,
    checkpoint,
    command,
    documents,
    run_settings,
    word_tokenizer,
    words,
)
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from transformer2.training import evaluate, train
from transformer2.training.parameters import is_new


def bytes_of(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(documents([20, 9, 3, 31, 12]))
    return file


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("residual", "local_mixer"), [(IDENTITY_DDL, "none"), ("short_swa", IDENTITY_SHORT_SWA)])
def test_frozen_tensors_keep_their_bytes_and_all_types_are_kept(tmp_path, text, residual, local_mixer, precision):
    model = checkpoint(tmp_path / "model", residual, local_mixer)
    report = train(run_settings(model, tmp_path / "out", text, precision=precision))
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if bytes_of(before[name]) != bytes_of(after[name])}
    assert changed
    assert all(is_new(name) for name in changed)
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: t.dtype for name, t in before.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert report["precision"] == precision
    assert report["parameters"]["new"]["trained"] == sum(t.numel() for name, t in before.items() if is_new(name))


def test_training_all_moves_everything_by_its_own_learning_rate(tmp_path, text):
    model = checkpoint(
        tmp_path / "model", "standard", IDENTITY_SHORT_SWA, dtype=torch.float32, tie_word_embeddings=True
    )
    settings = run_settings(model, tmp_path / "out", text, train="all", lr={"new": 1e-2, "pretrained": 1e-5}, steps=3)
    report = train(settings)
    assert report["steps"][-1]["learning_rates"].keys() == {"new", "pretrained"}
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in after
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert all(0 < moved[name] < 1e-4 for name in moved if not is_new(name))
    assert max(moved[name] for name in moved if is_new(name)) > 1e-3


def test_the_loss_falls_on_a_text_that_can_be_memorised(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join([words(24)] * 4))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt", train="all", steps=60)
    settings["optimisation"]["lr"] = {"new": 1e-2, "pretrained": 1e-2}
    report = train(settings)
    losses = [step["loss"] for step in report["steps"]]
    assert losses[0] > 4
    assert losses[-1] < 0.5
    rates = [step["learning_rates"]["new"] for step in report["steps"]]
    assert rates[0] == pytest.approx(1e-2 / 3)
    assert rates[-1] == pytest.approx(1e-3)


def test_the_report_says_what_happened_and_names_no_folder(tmp_path, text):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text, steps=4)
    settings["data"]["eval_tokens"] = 12
    settings["evaluation"] = {"every": 2}
    report = train(settings)
    assert json.loads((tmp_path / "out" / "training_report.json").read_text()) == json.loads(json.dumps(report))
    assert [entry["step"] for entry in report["evaluations"]] == [0, 2, 4]
    assert report["perplexity_after"] == report["evaluations"][-1]["perplexity"] != report["perplexity_before"]
    assert report["settings"]["data"]["train"] == "text.txt"
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["seconds"])
    for file in (tmp_path / "out").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    assert report["tokens"] <= 4 * 4 * 16


def test_held_out_perplexity_is_what_the_evaluation_of_the_same_text_says(tmp_path, text):
    (tmp_path / "held.txt").write_text(documents([18, 7]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text)
    settings["data"]["eval"] = str(tmp_path / "held.txt")
    report = train(settings)
    options = {"sequence_length": 16, "separator": "|"}
    before = evaluate(model, tmp_path / "held.txt", **options)
    after = evaluate(tmp_path / "out", tmp_path / "held.txt", **options)
    for entry, scores in zip(report["evaluations"], (before, after), strict=True):
        assert entry["tokens"] == scores["tokens"] == 22  # 25 words less two starts of documents and one of a row
        assert entry["perplexity"] == pytest.approx(scores["perplexity"], rel=1e-6)
        assert entry["bits_per_byte"] == pytest.approx(scores["bits_per_byte"], rel=1e-6)


def test_the_result_loads_with_transformers_alone_and_gives_the_same_logits(tmp_path, text):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2], "max_length": 77}')
    train(run_settings(model, tmp_path / "out", text))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    ids = torch.tensor([word_tokenizer()(words(20))["input_ids"]])
    with torch.no_grad():
        here = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    script = f"""
import sys
sys.modules["transformer2"] = None
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = {str(tmp_path / "out")!r}
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)({words(20)!r}, return_tensors="pt")["input_ids"]
with torch.no_grad():
    print(json.dumps([str(model.dtype), model(ids).logits.float().tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    dtype, there = json.loads(done.stdout.splitlines()[-1])
    assert dtype == "torch.bfloat16"
    torch.testing.assert_close(torch.tensor(there), here.float(), rtol=0, atol=0)


def test_the_same_seed_gives_the_same_weights_and_checkpointing_changes_nothing(tmp_path, text):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, dtype=torch.float32)
    weights = []
    for name, options in {"a": {}, "b": {}, "c": {"gradient_checkpointing": True}, "d": {"seed": 1}}.items():
        train(run_settings(model, tmp_path / name, text, **options))
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    assert any(not torch.equal(weights[3][name], tensor) for name, tensor in weights[0].items())


def test_a_plain_llama_can_be_trained_as_a_whole(tmp_path, text, monkeypatch, capsys):
    model = checkpoint(tmp_path / "model", None, dtype=torch.float16)
    (tmp_path / "run.yaml").write_text(json.dumps(run_settings(model, tmp_path / "out", text)))
    code, _, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml")
    assert code == 2
    assert "no trainable parameter" in error
    code, out, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml", "optimisation.train=all", "--json")
    assert code == 0, error
    assert json.loads(out)["parameters"]["new"] == {"trained": 0, "frozen": 0}
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), LlamaForCausalLM)
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.float16
