"""Runs that cannot succeed stop with one sentence and an exit code, and leave nothing behind."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_tools import IDENTITY_DDL, checkpoint, command, documents, run_settings

import transformer2.training.finetune as finetune
from transformer2.errors import CheckFailed
from transformer2.training import train


@pytest.fixture
def settings(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(documents([20, 9, 31]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    return run_settings(model, tmp_path / "out", text, steps=2)


@pytest.fixture
def run(tmp_path, settings, monkeypatch, capsys):
    """Run the command with the settings; on failure, nothing but the inputs may be there, and rows to look at."""

    def run(*overrides):
        (tmp_path / "run.yaml").write_text(json.dumps(settings))
        before = sorted(tmp_path.rglob("*"))
        code, out, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml", *overrides)
        if code != 0:
            rows = {
                tmp_path / "out-run",
                *(tmp_path / "out-run").glob("bad-rows-step-*"),
                tmp_path / "out-run" / "log.jsonl",
            }
            assert sorted(set(tmp_path.rglob("*")) - rows) == sorted(set(before) - rows)
            assert out == ""
            shutil.rmtree(tmp_path / "out-run", ignore_errors=True)
        return code, error.splitlines()[-1] if error else ""

    return run


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["optimisation.stpes=3"], 2, "Unknown setting 'optimisation.stpes': did you mean 'steps'?"),
        (["data.sequence_length=0"], 2, "data.sequence_length must be at least 2"),
        (["model=nowhere/to/be/found"], 2, "There is no folder nowhere/to/be/found"),
        (["model=some-org/not-here"], 2, "no model of that name could be fetched"),
        (["data.train={tmp}/empty.txt"], 2, "every document is empty"),
        (["data.train={tmp}/latin.txt"], 2, "is not UTF-8"),
        (["data.train={tmp}/gone.txt"], 2, "No such file"),
        (["data.eval_tokens=1000"], 2, "cannot be held out"),
        (["output={tmp}/full"], 2, "already exists; choose another name"),
        (["output={tmp}/model", "overwrite=true"], 2, "holds the model to start from"),
        (["output={tmp}/text.txt"], 2, "is a file"),
        (["optimisation.lr.new=1e30", "optimisation.clip=null"], 1, "at step 2, so training stopped"),
    ],
)
def test_bad_input_stops_the_run(run, tmp_path, overrides, code, message):
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("keep me")
    assert run(*(override.format(tmp=tmp_path) for override in overrides))[0] == code
    assert message in run(*(override.format(tmp=tmp_path) for override in overrides))[1]
    assert (tmp_path / "full" / "notes.txt").read_text() == "keep me"


def test_checkpoints_that_cannot_be_trained_are_named(run, tmp_path):
    model = tmp_path / "model"
    weights = load_file(model / "model.safetensors")
    config = (model / "config.json").read_text()

    nan = {name: torch.full_like(t, float("nan")) if name == "model.norm.weight" else t for name, t in weights.items()}
    save_file(nan, model / "model.safetensors", {"format": "pt"})
    assert run()[0] == 1
    assert "The loss is nan at step 1" in run()[1]

    gone = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up" not in name}
    save_file(gone, model / "model.safetensors", {"format": "pt"})
    assert "lacks 1 of its model's weights, such as model.layers.1.mlp.up_proj.weight" in run()[1]

    small = {**weights, "model.norm.weight": weights["model.norm.weight"].to(torch.int8)}
    save_file(small, model / "model.safetensors", {"format": "pt"})
    assert "is quantised (model.norm.weight is I8)" in run()[1]

    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text('{"model_type": "no_such"}')
    assert "Cannot load the model" in run()[1]
    (model / "config.json").unlink()
    assert "has no config.json" in run()[1]
    (model / "config.json").write_text(config)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "has no usable tokenizer" in run()[1]


def test_an_output_is_replaced_only_by_a_run_that_succeeded(run, tmp_path, settings):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("old")
    (tmp_path / "out" / "config.json").write_text('{"model_type": "transformer2"}')  # an older model
    settings["overwrite"] = True
    assert run("optimisation.lr.new=1e30", "optimisation.clip=null")[0] == 1
    assert (tmp_path / "out" / "notes.txt").read_text() == "old"
    assert run()[0] == 0
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "run.yaml", "text.txt"]


def test_a_failure_while_writing_leaves_no_folder(settings, tmp_path, monkeypatch):
    def changes_a_frozen_tensor(model, folder, source, dtypes):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-6
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(finetune, "write_checkpoint", changes_a_frozen_tensor)
    with pytest.raises(CheckFailed, match="The frozen tensor model.norm.weight differs"):
        train(settings)
    assert sorted(os.listdir(tmp_path)) == ["model", "text.txt"]


def test_the_settings_can_be_printed_without_a_run(settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    arguments = [tmp_path / "run.yaml", "optimisation.lr.new=3e-3", "--print-config"]
    code, out, _ = command(monkeypatch, capsys, "train", *arguments)
    assert code == 0
    assert "    new: 0.003" in out.splitlines()
    assert "  gradient_checkpointing: false" in out.splitlines()
    assert not (tmp_path / "out").exists()
    assert command(monkeypatch, capsys, "train", tmp_path / "run.yaml", "--no-print-config")[0] == 2
    code, _, error = command(monkeypatch, capsys, "train", tmp_path / "none.yaml")
    assert code == 2
    assert "Cannot read the configuration file" in error


def test_a_model_that_is_broken_before_training_is_not_blamed_on_the_learning_rates(run, settings, tmp_path):
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    settings["data"]["eval_tokens"] = 40
    code, said = run()
    assert code == 1
    assert "Before any training, the model's loss on the held-out text is not finite" in said
