"""Verification of what `train` made of a conversion: pretrained tensors still the source's, or which are not."""

import json

import pytest
import torch
from helpers import tiny_llama
from safetensors.torch import load_file, save_file
from training_tools import command, documents, run_settings, word_tokenizer

from transformer2.conversion import convert, inspect_checkpoint, verify
from transformer2.training import train

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make(folder, train_what="new", dtype=torch.bfloat16, change=lambda source: None, **options):
    """A Llama, its conversion, and what training made of that."""
    source = folder / "llama"
    tiny_llama(dtype=dtype, eos_token_id=1, bos_token_id=None, **options).save_pretrained(source)
    word_tokenizer().save_pretrained(source)
    (source / "dequantisation.json").write_text('{"source": "model.gguf"}')
    change(source)
    convert(source, folder / "out", residual="ddl", local_mixer={"type": "short_swa", "window": 4}, verify="L0")
    (folder / "text.txt").write_text(documents([20, 9, 31]))
    settings = run_settings(folder / "out", folder / "tuned", folder / "text.txt", steps=2, train=train_what)
    settings["optimisation"]["lr"] = {"new": 1e-2, "pretrained": 1e-2}
    train(settings)
    return source, folder / "tuned"


def head_only(source):
    tensors = load_file(source / "model.safetensors")
    tensors[HEAD] = tensors.pop(EMBEDDING)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def both_stored(source):
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, source / "model.safetensors", {"format": "pt"})


def rotary(source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "change", "options"),
    [
        (torch.bfloat16, lambda source: None, {}),
        (torch.float32, lambda source: None, {"tie_word_embeddings": True}),
        (torch.float16, head_only, {"tie_word_embeddings": True}),
        (torch.bfloat16, both_stored, {"tie_word_embeddings": True}),
        (torch.float32, rotary, {"use_cache": False}),
    ],
)
def test_pretrained_tensors_keep_their_bytes(tmp_path, dtype, change, options):
    source, tuned = make(tmp_path, dtype=dtype, change=change, **options)
    assert not (tuned / "model.safetensors.index.json").exists()  # written as one file
    result = verify(source, tuned)
    assert result["failures"] == []
    assert result["level"] == "L1"
    assert [(check["level"], check["name"]) for check in result["checks"]] == [
        ("L0", "base tensors"),
        ("L0", "new tensors"),
        ("L0", "config"),
        ("L1", "tensor bytes"),
        ("L1", "carried files"),
    ]
    (note,) = result["notes"]
    assert note.startswith("This folder was trained, its new parameters only: its logits and gradients are expected")
    assert verify(source, tuned, "l0")["level"] == "L0"


def test_what_should_not_have_changed_is_found(tmp_path):
    source, tuned = make(tmp_path)
    tensors = load_file(tuned / "model.safetensors")
    name, own = "model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp_residual.rewrite.erase"

    def failures(**changes):
        left = {key: value for key, value in {**tensors, **changes}.items() if value is not None}
        save_file(left, tuned / "model.safetensors", {"format": "pt"})
        return verify(source, tuned)["failures"]

    assert failures(**{name: tensors[name] + 1}) == [f"L1 tensor bytes: {name} has other bytes than in the source"]
    assert failures(**{name: tensors[name].float()})[0].startswith(
        f"L0 base tensors: {name} was BF16 [48, 32] and is F32"
    )
    assert failures(**{name: None})[0] == f"L0 base tensors: {name} is missing"
    assert failures(**{own: None}) == [f"L0 new tensors: {own} is missing"]
    assert failures(extra=torch.ones(1)) == ["L0 new tensors: extra is not implied by the config"]
    assert failures() == []
    (tuned / "tokenizer.json").write_text("{}")
    assert failures() == ["L1 carried files: tokenizer.json differs from the source's tokenizer.json"]
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert failures()[0] == "L0 config: rms_norm_eps does not follow from the source's config"


def test_a_run_that_trained_everything_says_which_tensors_differ(tmp_path, monkeypatch, capsys):
    source, tuned = make(tmp_path, "all", torch.float32)
    code, out, error = command(monkeypatch, capsys, "verify", source, tuned)
    assert code == 0, error
    assert out == f"{tuned}: all 4 checks up to L1 hold.\n"
    assert "Note: This folder was trained, all its parameters, 30 of 30 pretrained tensors differ (" in error
    assert "are expected to differ from the source's, so L2 and L3 are left out." in error
    train(run_settings(tuned, tmp_path / "again", tmp_path / "text.txt", steps=1))  # of the new parameters only
    assert verify(source, tmp_path / "again")["failures"] == []  # what the first run changed is no fault of the second


def test_where_the_base_came_from_is_carried_along(tmp_path):
    _, tuned = make(tmp_path)
    for name in ("transformer2_conversion.json", "dequantisation.json"):
        assert (tuned / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert inspect_checkpoint(tuned)["provenance"]["source"]["name"] == "llama"
    assert not (tuned / "verification.json").exists()  # it was about the base


def test_a_training_report_of_the_source_is_not_taken_for_that_of_the_conversion(tmp_path):
    def trained(source):
        (source / "training_report.json").write_text('{"pretrained_changed": true}')

    source, _ = make(tmp_path, change=trained)
    assert not (tmp_path / "out" / "training_report.json").exists()
    assert verify(source, tmp_path / "out", "L2", fresh_process=False)["level"] == "L2"
