"""Ctrl-C and kills of the real commands: one sentence, exit code 130, no output; what a kill left goes later."""

import fcntl
import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
from training_tools import IDENTITY_DDL, checkpoint, documents, run_settings

from transformer2.errors import UserError
from transformer2.training import train

COMMAND = [sys.executable, "-m", "transformer2"]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt", steps=100_000)
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    return settings


def stop_at(line_start: str, send: int, *arguments: str) -> tuple[int, str]:
    """Start a command, send it a signal once it has said a line, and return its exit code and all that it said."""
    run = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, text=True, preexec_fn=listen)
    with_patience = threading.Timer(300, run.kill)  # a command that goes on fails the test, and does not hang it
    with_patience.start()
    said = ""
    for line in run.stderr:
        said += line
        if line.startswith(line_start):
            run.send_signal(send)
            break
    said += run.stderr.read()
    with_patience.cancel()
    return run.wait(timeout=60), said


def listen() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that the tests start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_interrupted_conversion(llama_folder, tmp_path):
    arguments = ["convert", str(llama_folder), str(tmp_path / "new" / "out"), "--residual", "ddl"]
    code, said = stop_at("Verifying (L3)", signal.SIGINT, *arguments)
    assert code == 130
    assert said.splitlines()[-1] == "Interrupted; no file was left half-written."
    assert "Traceback" not in said
    assert names(tmp_path) == ["llama"]


def test_interrupted_training(settings, tmp_path):
    code, said = stop_at("frozen ", signal.SIGINT, "train", str(tmp_path / "run.yaml"))
    assert code == 130
    assert said.splitlines()[-1] == "Interrupted; no file was left half-written."
    assert "Traceback" not in said
    assert names(tmp_path) == ["model", "run.yaml", "text.txt"]


def test_what_job_schedulers_send_ends_training_with_its_state_saved(settings, tmp_path):
    code, said = stop_at("frozen ", signal.SIGTERM, "train", str(tmp_path / "run.yaml"))
    assert code == 143
    assert "the same command goes on from there" in said.splitlines()[-1]
    assert names(tmp_path) == ["model", "out-run", "run.yaml", "text.txt"]


def test_killed_training_is_cleared_up_by_the_next_one(settings, tmp_path):
    code, _ = stop_at("frozen ", signal.SIGKILL, "train", str(tmp_path / "run.yaml"))
    assert code == -signal.SIGKILL
    (leftover,) = [name for name in names(tmp_path) if name.startswith(".out.partial-")]
    with open(tmp_path / leftover / ".journal.jsonl", "a") as journal:  # as if it were still at work
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another run is writing .*out; wait for it to end"):
            train({**settings, "optimisation": {"steps": 1}})
    assert leftover in names(tmp_path)
    train({**settings, "optimisation": {"steps": 1}})
    assert names(tmp_path) == ["model", "out", "run.yaml", "text.txt"]
    assert ".journal.jsonl" not in names(tmp_path / "out")


def test_log_files_get_few_lines(settings, tmp_path):
    run = subprocess.run(
        [*COMMAND, "train", str(tmp_path / "run.yaml"), "optimisation.steps=40"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "\r" not in run.stderr
    assert "%|" not in run.stderr
    steps = [line.split(":")[0] for line in run.stderr.splitlines() if line.startswith("step ")]
    assert steps == [f"step {number} of 40" for number in range(4, 41, 4)]
