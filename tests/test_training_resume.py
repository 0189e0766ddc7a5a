"""A run that was stopped goes on as if it had not been: bit for bit, from every step, whatever was being written."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from test_interruption import stop_at
from training_tools import IDENTITY_DDL, IDENTITY_SHORT_SWA, checkpoint, documents, run_settings

from transformer2.errors import UserError
from transformer2.training import checkpoints, loop, train
from transformer2.training.checkpoints import is_complete, newest, rotate, write_checkpoint
from transformer2.training.stopping import Preempted, Stopping

STEPS = 4  # of each of two stages; a step has 4 rows, and there are 16 rows or fewer: two epochs


@pytest.fixture
def settings(tmp_path):
    """Two stages with all that has a state: dropout, carried moments, schedules of parameters, evaluations."""
    (tmp_path / "text.txt").write_text(documents([20, 9, 3, 31, 12, 40, 40, 30, 32]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, attention_dropout=0.2)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt")
    settings["data"]["eval_tokens"] = 20
    settings["evaluation"] = {"every": 3}
    settings["stages"] = [
        {"name": "operators", "train": "new", "steps": STEPS, "lr": {"new": 3e-3}},
        {"name": "joint", "train": "lora", "steps": STEPS, "lora": {"r": 2, "dropout": 0.1}, "schedule": "wsd"},
    ]
    return settings


def everything(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors") | load_file(folder / "adapter" / "adapter_model.safetensors")


def train_until(step: int, settings, monkeypatch, **patches) -> None:
    """A run that is told to stop once it has done `step` steps. patches: of `training.state`."""
    taken = loop.Loop._step

    def counted(self):
        taken(self)
        if self.counters.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Loop, "_step", counted)
        for name, value in patches.items():
            patch.setattr(loop.state, name, value)
        with pytest.raises(Preempted, match=f"at step {step};"):
            train(settings)


def without_times(report):
    return {
        key: value for key, value in report.items() if key not in ("seconds", "tokens_per_second", "resumed", "mfu")
    }


def test_going_on_from_every_step_gives_the_same_bits(tmp_path, settings, monkeypatch):
    whole = train(settings)
    assert whole["rows"] < 2 * STEPS * 4 < 3 * whole["rows"]  # two epochs and a bit
    weights, log = everything(tmp_path / "out"), (tmp_path / "out" / "log.jsonl").read_text()
    for step in range(1, 2 * STEPS + 1):
        again = {**settings, "output": str(tmp_path / f"out{step}")}
        train_until(step, again, monkeypatch)
        assert not (tmp_path / f"out{step}").exists()
        report = train(again)
        assert report["resumed"]
        assert without_times(report) == {**without_times(whole), "settings": report["settings"]}
        for name, tensor in everything(tmp_path / f"out{step}").items():
            assert torch.equal(tensor, weights[name]), (step, name)
        losses = [
            [(line["step"], line["loss"]) for line in map(json.loads, text.splitlines()) if "loss" in line]
            for text in ((tmp_path / f"out{step}" / "log.jsonl").read_text(), log)
        ]
        assert losses[0] == losses[1]
        assert not (tmp_path / f"out{step}-run").exists()


def test_moments_are_carried_by_name_and_change_the_result(tmp_path, settings, monkeypatch):
    """So that the test above cannot pass with an optimiser that starts afresh at every stage or resumption."""
    train(settings)
    monkeypatch.setattr(loop.state, "load_optimizer_tensors", lambda optimizer, tensors: None)
    train({**settings, "output": str(tmp_path / "fresh")})
    weights, fresh = everything(tmp_path / "out"), everything(tmp_path / "fresh")
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in weights.items())


def test_a_checkpoint_that_was_being_written_is_not_gone_on_from(tmp_path, settings, monkeypatch):
    settings["checkpoints"] = {"every": 2, "keep": 2}
    whole = train(settings)
    settings["output"] = str(tmp_path / "killed")
    folder = tmp_path / "killed-run"
    train_until(5, settings, monkeypatch)
    assert [path.name for path in checkpoints.found(folder)] == ["step-00000004", "step-00000005"]
    # as a kill in the middle of each phase leaves it: no marker, a torn file, a half-made folder
    (folder / "step-00000005" / "COMPLETE").unlink()
    torn = folder / "step-00000007"
    shutil.copytree(folder / "step-00000004", torn)
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-1])
    (folder / ".step-00000008.partial-abcd").mkdir()
    assert newest(folder).name == "step-00000004"
    report = train(settings)
    assert without_times(report)["steps"] == whole["steps"]
    for name, tensor in everything(tmp_path / "killed").items():
        assert torch.equal(tensor, everything(tmp_path / "out")[name]), name


def test_killed_while_a_checkpoint_is_written(tmp_path, settings):
    """A real SIGKILL, in a process of its own, after some files of the second checkpoint."""
    settings["checkpoints"] = {"every": 2}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    script = f"""
import os, signal
from transformer2.training import state, train
save = state.save
def dies(folder, counters, *rest):
    save(folder, counters, *rest)
    if counters.step == 4:
        (folder / "optimizer.safetensors").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
state.save = dies
train({str(tmp_path / "run.yaml")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert newest(tmp_path / "out-run").name == "step-00000002"
    assert len(list((tmp_path / "out-run").glob(".step-00000004.partial-*"))) == 1
    resumed = train(settings)
    whole = train({**settings, "output": str(tmp_path / "whole")})
    assert resumed["steps"] == whole["steps"]
    assert resumed["resumed"]
    assert not whole["resumed"]


def test_rotation_never_deletes_the_only_complete_checkpoint(tmp_path):
    def build(path):
        (path / "file").write_text(path.name)

    for step in range(1, 5):
        write_checkpoint(tmp_path, f"step-{step:08d}", build)
    rotate(tmp_path, 2)
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / "file").write_text("torn")
    rotate(tmp_path, 1)
    assert is_complete(tmp_path / "step-00000003")
    assert newest(tmp_path).name == "step-00000003"

    def fails(path):
        (path / "file").write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_checkpoint(tmp_path, "step-00000009", fails)
    assert newest(tmp_path).name == "step-00000003"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, p: s["stages"][0].update(lr={"new": 1e-3}), "belongs to a run with stages="),
        (lambda s, p: s["optimisation"].update(seed=3), r"belongs to a run with optimisation.seed=0, and this .* 3\."),
        (lambda s, p: (p / "text.txt").write_text(documents([50, 60, 40])), "on other text"),
        (lambda s, p: checkpoint(p / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, seed=5), "on other weights"),
        (lambda s, p: s.update(resume=False), "resume=false would lose them"),
    ],
)
def test_a_run_folder_of_another_run_is_refused_and_kept(tmp_path, settings, monkeypatch, change, message):
    train_until(1, settings, monkeypatch)
    if "weights" in message:
        shutil.rmtree(tmp_path / "model")
    change(settings, tmp_path)
    with pytest.raises(UserError, match=message):
        train(settings)
    assert is_complete(tmp_path / "out-run" / "step-00000001")


def test_starting_anew_where_that_is_asked_for(tmp_path, settings, monkeypatch):
    train_until(2, settings, monkeypatch)
    report = train({**settings, "resume": False, "overwrite": True})
    assert not report["resumed"]
    assert not (tmp_path / "out-run").exists()


def test_random_numbers_that_cannot_be_restored_are_an_error(tmp_path, settings, monkeypatch):
    broken = {"python": [3, [1], None], "numpy": [], "torch": "00"}
    train_until(1, settings, monkeypatch, random_state=lambda: broken)
    with pytest.raises(UserError, match="random numbers cannot be restored"):
        train(settings)


def test_an_evaluation_that_is_stopped_is_done_again(tmp_path, settings, monkeypatch):
    whole = train(settings)
    agreed, asked = Stopping.agreed, []

    def during_the_second_evaluation(self, save_now=False):
        asked.append(sys._getframe(1).f_code.co_name)
        if asked.count("<lambda>") == 2 and asked[-1] == "<lambda>":
            self.asked = True
        return agreed(self, save_now)

    settings["output"] = str(tmp_path / "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "agreed", during_the_second_evaluation)
        with pytest.raises(Preempted, match="at step 3;"):
            train(settings)
    assert without_times(train(settings))["evaluations"] == whole["evaluations"]


def test_sigterm_saves_and_exits_with_143(tmp_path, settings):
    settings["stages"][0]["steps"] = 100_000
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    code, said = stop_at("step 3: held-out", signal.SIGTERM, "train", str(tmp_path / "run.yaml"))
    assert code == 143
    assert said.splitlines()[-1].startswith("Told to stop at step ")
    assert newest(tmp_path / "out-run") is not None
    assert not (tmp_path / "out").exists()
