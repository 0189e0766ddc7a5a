"""The gradient of an optimiser step does not depend on how the step is cut up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import tiny_model
from safetensors.torch import load_file
from training_tools import IDENTITY_SHORT_SWA, checkpoint, documents, run_settings, word_tokenizer

from transformer2.training import train
from transformer2.training.data import tokenize
from transformer2.training.launching import enable_checkpointing
from transformer2.training.step import accumulate

RAGGED = [3, 17, 1, 9, 30, 2, 2, 25, 11, 6, 1, 1, 14]  # 122 words: rows with 10 to 15 targets, the last one short


def gradients(model, rows, rows_per_batch: int) -> tuple[float, dict[str, torch.Tensor]]:
    AcceleratorState._reset_state()
    model.zero_grad()
    loss = accumulate(Accelerator(), model, list(rows), rows_per_batch)
    return loss, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture
def rows():
    rows = tokenize(documents(RAGGED).split("|"), word_tokenizer()).with_end(1).rows(16)
    assert len({row.num_targets for row in rows}) > 3  # ragged
    return rows


def test_micro_batches_of_any_size_give_the_gradient_of_the_mean_over_all_tokens(rows):
    model = tiny_model({"type": "ddl", "form": "identity"}, "short_swa").double()
    one, gradients_one = gradients(model, rows, 1)
    for size in (3, 8, 100):
        many, gradients_many = gradients(model, rows, size)
        assert many == pytest.approx(one, rel=1e-6)  # the library computes losses in float32
        for name, gradient in gradients_one.items():
            torch.testing.assert_close(gradients_many[name], gradient, rtol=1e-6, atol=1e-12, msg=name)

    # independently: every document piece alone, through the library's loss, weighted by its targets
    model.zero_grad()
    total = targets = 0
    for row in rows:
        for piece in torch.tensor(row.input_ids).tensor_split(torch.tensor((row.position_ids == 0).nonzero()[0][1:])):
            if len(piece) > 1:
                loss = model(input_ids=piece[None], labels=piece[None]).loss * (len(piece) - 1)
                total, targets = total + loss, targets + len(piece) - 1
    (total / targets).backward()
    assert one == pytest.approx((total / targets).item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients_one[name], rtol=1e-4, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("residual", "local_mixer"), [({"type": "ddl", "value_channels": 2}, "none"), ("short_swa", "short_swa")]
)
def test_gradient_checkpointing_gives_the_same_gradients(rows, residual, local_mixer):
    model = tiny_model(residual, local_mixer).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            "residual" in name or "local_" in name
        )  # frozen embeddings: no input needs a gradient
    model.zero_grad()

    def new_gradients():
        AcceleratorState._reset_state()
        model.zero_grad()
        accumulate(Accelerator(), model, list(rows)[:2], 1)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    plain = new_gradients()
    enable_checkpointing(model)
    again = new_gradients()
    assert any(gradient.abs().max() > 0 for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_two_processes_train_as_one(tmp_path):
    """On the CPU, over gloo; one process writes and reports. (`accelerate launch --cpu` would need MPI.)"""
    model = checkpoint(tmp_path / "model", "standard", IDENTITY_SHORT_SWA, dtype=torch.float32)
    (tmp_path / "text.txt").write_text(documents(RAGGED))
    settings = run_settings(model, tmp_path / "one", tmp_path / "text.txt", rows_per_batch=2, steps=3)
    settings["data"]["eval_tokens"] = 20
    one = train(settings)
    settings["output"] = str(tmp_path / "two")
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }
    command = [
        *launch,
        "-m",
        "transformer2.training.finetune",
        str(tmp_path / "run.yaml"),
        "optimisation.rows_per_batch=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Trained ") == 1
    assert done.stderr.count("step 3: held-out perplexity") == 1
    two = json.loads((tmp_path / "two" / "training_report.json").read_text())
    assert two["processes"] == 2
    for a, b in zip(one["steps"], two["steps"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["gradient_norm"] == pytest.approx(a["gradient_norm"], rel=1e-5)
    assert two["perplexity_before"] == pytest.approx(one["perplexity_before"], rel=1e-5)
    assert two["perplexity_after"] == pytest.approx(one["perplexity_after"], rel=1e-5)
    weights, others = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-5, msg=name)

    command[-1] = "optimisation.precision=auto"  # measured by one process for both
    command.append("optimisation.steps=1")
    command.append("overwrite=true")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(tmp_path), timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "training_report.json").read_text())["processes"] == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
