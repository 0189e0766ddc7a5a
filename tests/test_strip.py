"""The way back: every file of the source with its old bytes, an equal export, or a refusal."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import RESIDUALS, tiny_llama, tokens
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from transformer2 import Transformer2ForCausalLM
from transformer2.conversion import convert, strip, verify
from transformer2.conversion.checkpoints import PROVENANCE
from transformer2.errors import CheckFailed, UserError
from transformer2.training.saving import write_checkpoint
from transformer2_cli import app

BASE, NEW = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def contents(folder):
    """SHA-256 of every file, by name."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def make_source(folder, shards=1, **overrides):
    model = tiny_llama(**overrides)
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if shards > 1 else {}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Base")
    (folder / "LICENSE").write_text("Do as you like.\r\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = folder / "config.json"
    config.write_bytes(config.read_bytes().replace(b"\n", b"\r\n"))  # bytes, not what JSON makes of them
    return folder


def train(source, output, amount, only_new=True):
    """What a training run leaves: the model saved by the library, with other values."""
    shutil.rmtree(output, ignore_errors=True)
    model = Transformer2ForCausalLM.from_pretrained(source, dtype="auto")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    new = set(json.loads((source / PROVENANCE).read_text())["new_tensors"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (name in new) == only_new:
                parameter.add_(amount)
    write_checkpoint(model, output, source, dtypes)
    (output / "training_report.json").write_text(json.dumps({"pretrained_changed": not only_new}))
    return output


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("residual", ["standard", "ddl_identity", "ddl_identity_tc_ec", "depth_swa_identity"])
def test_every_byte_comes_back(tmp_path, residual, shards):
    source = make_source(tmp_path / "llama", shards, tie_word_embeddings=True, dtype=torch.bfloat16)
    convert(source, tmp_path / "out", residual=RESIDUALS[residual], verify="L0", materialize="copy")
    report = strip(tmp_path / "out", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert report["identical"]
    assert report["warnings"] == []
    assert sorted(report["files"]) == sorted(contents(source))


def test_linked_shards(tmp_path):
    source = make_source(tmp_path / "llama", 3)
    convert(source, tmp_path / "out", residual="ddl", verify="L0", materialize="link")
    with pytest.raises(UserError, match="hash of model-00001-of-.* is unknown.* --level L1"):
        strip(tmp_path / "out", tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert verify(source, tmp_path / "out", "L1")["passed"]
    assert strip(tmp_path / "out", tmp_path / "back")["identical"]
    assert contents(tmp_path / "back") == contents(source)
    assert not any((tmp_path / "back" / name).samefile(source / name) for name in contents(source))


def test_trained_new_parameters_are_dropped(tmp_path):
    source = make_source(tmp_path / "llama", 3, tie_word_embeddings=True)
    convert(source, tmp_path / "out", residual="ddl", local_mixer="short_swa", verify="L0", materialize="copy")
    trained = train(tmp_path / "out", tmp_path / "trained", 0.05)
    assert not (trained / BASE).exists()
    report = strip(trained, tmp_path / "back")
    before, after = contents(source), contents(tmp_path / "back")
    assert after == {name: before[name] for name in after}
    assert set(before) - set(after) == {"README.md"}
    assert not report["identical"]
    assert report["warnings"] == [
        "README.md: not in the converted folder any more, so not restored.",
        "The training of the new parameters is gone with them: this is the source as it was.",
    ]


def test_a_stored_copy_of_tied_embeddings(tmp_path):
    """Training stores tied embeddings once: both names come back, with the trained values where they were trained."""
    source = make_source(tmp_path / "llama", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    trained = train(tmp_path / "out", tmp_path / "trained", 0.05)
    assert "lm_head.weight" not in load_file(next(trained.glob("*.safetensors")))
    strip(trained, tmp_path / "back")
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    trained = train(tmp_path / "out", tmp_path / "trained", 0.01, only_new=False)
    strip(trained, tmp_path / "export")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(plain.lm_head.weight, tensors["lm_head.weight"] + 0.01)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight


def test_trained_tensors_are_exported_where_the_function_is_equal(tmp_path):
    source = make_source(tmp_path / "llama", tie_word_embeddings=True)
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    trained = train(tmp_path / "out", tmp_path / "trained", 0.01, only_new=False)
    report = strip(trained, tmp_path / "back")
    assert not report["identical"]
    assert all(figures["bit_equal"] for figures in report["logits"].values() if "bit_equal" in figures)
    assert "float32 cached" in report["logits"]
    plain, info = LlamaForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values())
    model, ids = Transformer2ForCausalLM.from_pretrained(trained).eval(), tokens()
    with torch.no_grad():
        assert torch.equal(plain.eval()(ids).logits, model(ids).logits)
        assert not torch.equal(plain(ids).logits, LlamaForCausalLM.from_pretrained(source).eval()(ids).logits)


@pytest.mark.parametrize("stream_layers", [False, True])
def test_no_way_back(tmp_path, stream_layers):
    source = make_source(tmp_path / "llama")
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    trained = train(tmp_path / "out", tmp_path / "trained", 0.05)
    trained = train(trained, tmp_path / "twice", 0.01, only_new=False)
    with pytest.raises(CheckFailed, match="no plain checkpoint equals it; nothing was written") as error:
        strip(trained, tmp_path / "back", stream_layers=stream_layers)
    assert error.value.exit_code == 1
    assert not (tmp_path / "back").exists()


def test_a_damaged_tensor_is_not_passed_off_as_the_source(tmp_path):
    source = make_source(tmp_path / "llama")
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    tensors = load_file(tmp_path / "out" / BASE)
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, tmp_path / "out" / BASE, metadata={"format": "pt"})
    report = strip(tmp_path / "out", tmp_path / "back")
    assert not report["identical"]
    assert report["warnings"] == [
        "Pretrained tensors differ from the source's: this is an export of them, not the source."
    ]


def test_bad_input(tmp_path):
    source = make_source(tmp_path / "llama")
    with pytest.raises(UserError, match="no Transformer2 checkpoint, so there is nothing to strip"):
        strip(source, tmp_path / "back")
    with pytest.raises(UserError, match="There is no folder"):
        strip(tmp_path / "missing", tmp_path / "back")
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    with pytest.raises(UserError, match="already exists"):
        strip(tmp_path / "out", source)
    with pytest.raises(UserError, match="overlap"):
        strip(tmp_path / "out", tmp_path / "out" / "back")
    record = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    del record["original"]
    (tmp_path / "out" / PROVENANCE).write_text(json.dumps(record))
    with pytest.raises(UserError, match="convert the source again"):
        strip(tmp_path / "out", tmp_path / "back")
    (tmp_path / "out" / PROVENANCE).unlink()
    with pytest.raises(UserError, match="was not converted from a plain checkpoint"):
        strip(tmp_path / "out", tmp_path / "back")


def test_command(tmp_path):
    source = make_source(tmp_path / "llama")
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    run = CliRunner().invoke(app, ["strip", str(tmp_path / "out"), str(tmp_path / "back")])
    assert run.exit_code == 0, run.output
    assert "tensors; every file has its old bytes." in run.stdout
    run = CliRunner().invoke(app, ["strip", str(tmp_path / "out"), str(tmp_path / "back"), "--overwrite", "--json"])
    assert json.loads(run.stdout)["identical"] is True
    command = [sys.executable, "-m", "transformer2", "strip", str(source), str(tmp_path / "other")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("Error: ")
    assert "Traceback" not in run.stderr
