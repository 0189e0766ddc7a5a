"""Paths that cannot work: each gives one sentence and an exit code, and leaves nothing behind."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pytest
from helpers import tiny_llama
from training_tools import command

import transformer2_cli
from transformer2.conversion import convert, inspect_checkpoint, publishing, verify
from transformer2.conversion.paths import plain_os_errors, sentence
from transformer2.errors import MachineError, UserError
from transformer2.training import evaluate, generate, train

LONG = "x" * 300


@pytest.fixture
def folder(tmp_path):
    """A source, a file, and a loop of symbolic links."""
    tiny_llama().save_pretrained(tmp_path / "llama")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


def everything(folder):
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("file/out", "file is a file, so there can be no folder"),
        ("file/deep/out", "file is a file, so there can be no folder"),
        ("loop", "is a symbolic link"),
        ("loop/out", "symbolic links|File exists"),
        (LONG, "File name too long"),
        (f"new/{LONG}/out", "File name too long"),
        ("x" * 250, "File name too long"),  # a name that itself would fit, but not the one it is built under
        pytest.param(
            "/proc/foo",
            "/proc/foo cannot be used",
            marks=pytest.mark.skipif(not os.path.isdir("/proc"), reason="no /proc"),
        ),
    ],
)
def test_outputs_that_cannot_be_made(folder, monkeypatch, capsys, output, reason):
    before = everything(folder)
    code, out, error = command(
        monkeypatch, capsys, "convert", folder / "llama", folder / output, "--residual", "ddl", "--verify", "L0"
    )
    assert (code, out) == (2, "")
    (line,) = [line for line in error.splitlines() if line.startswith("Error: ")]
    assert error.splitlines()[-1] == line
    assert re.search(reason, line)
    assert everything(folder) == before


@pytest.mark.parametrize("source", ["loop", "loop/llama", LONG, f"{LONG}/llama", "file/llama", "~nobody-at-all/llama"])
@pytest.mark.parametrize("action", ["convert", "verify", "inspect", "eval", "against", "generate", "train"])
def test_sources_that_cannot_be_read(folder, source, action):
    source = source if source.startswith("~") else str(folder / source)
    (folder / "text.txt").write_text("w3 w4 w5")
    settings = {"model": source, "output": str(folder / "out"), "data": {"train": str(folder / "text.txt")}}
    actions = {
        "convert": lambda: convert(source, folder / "new" / "out", verify="L0"),
        "verify": lambda: verify(folder / "llama", source),
        "inspect": lambda: inspect_checkpoint(source),
        "eval": lambda: evaluate(source, folder / "text.txt"),
        "against": lambda: evaluate(folder / "llama", folder / "text.txt", against=source),
        "generate": lambda: generate(source, "w3"),
        "train": lambda: train(settings),
    }
    before = everything(folder)
    with pytest.raises(UserError) as error:
        actions[action]()
    assert "\n" not in str(error.value)
    if source.endswith("loop"):
        assert "is a symbolic link to nothing, or to itself" in str(error.value)
    assert everything(folder) == before


@pytest.mark.parametrize(
    "name", ["transformer2_conversion.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"]
)
@pytest.mark.parametrize("empty", [True, False])
def test_folder_in_place_of_a_file(folder, name, empty):
    source = folder / "llama"
    (source / name).unlink(missing_ok=True)
    (source / name).mkdir()
    if not empty:
        (source / name / "inside").touch()
    before = everything(folder)
    for action in (lambda: convert(source, folder / "out", verify="L0"), lambda: inspect_checkpoint(source)):
        with pytest.raises(UserError, match=f"{name} is a folder, where a model has a file; move it away"):
            action()
    for action in (lambda: evaluate(source, folder / "file"), lambda: generate(source, "w3")):
        with pytest.raises(UserError, match=f"{name} is a folder"):
            action()
    assert everything(folder) == before


def test_link_to_nothing_in_place_of_a_file(folder):
    (folder / "llama" / "tokenizer.json").symlink_to(folder / "gone")
    with pytest.raises(UserError, match="tokenizer.json is a symbolic link to nothing"):
        convert(folder / "llama", folder / "out", verify="L0")  # it would be left out without a word
    assert not (folder / "out").exists()


def test_disk_that_fills_up_while_downloading(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    for action in (lambda: evaluate("some/model", "text.txt"), lambda: convert("some/model", "out")):
        with pytest.raises(MachineError, match="is full"):
            action()


def test_whatever_slips_through_becomes_a_sentence(capsys):
    with pytest.raises(SystemExit) as stop, transformer2_cli.reporting_errors():
        (Path("/") / LONG).stat()
    assert stop.value.code == 2
    assert "cannot be used (File name too long)" in capsys.readouterr().err


def test_failed_run_takes_the_folders_that_it_made_with_it(folder):
    before = everything(folder)
    with pytest.raises(RuntimeError, match="stop"):
        convert(folder / "llama", folder / "new" / "deep" / "out", residual="ddl", verify="L0", progress=stop)
    assert everything(folder) == before
    (folder / "new").mkdir()
    with pytest.raises(RuntimeError, match="stop"):
        convert(folder / "llama", folder / "new" / "deep" / "out", residual="ddl", verify="L0", progress=stop)
    assert everything(folder) == sorted([*before, str(folder / "new")])  # that one was there


def stop(message):
    if message.startswith("Verifying"):
        raise RuntimeError("stop")


def test_kinds_of_errors():
    assert isinstance(sentence(28, "/a"), MachineError)
    assert "The disk of /a is full" in str(sentence(28, "/a"))
    assert isinstance(sentence(5, "/a"), MachineError)  # a broken disk
    assert sentence(13, "/a").exit_code == sentence(40, "/a").exit_code == 2
    for untouched in (BrokenPipeError(32, "gone"), OSError("from a library"), RuntimeError("a bug")):
        with pytest.raises(type(untouched)) as error, plain_os_errors():
            raise untouched
        assert error.value is untouched


def test_of_two_runs_one_gets_the_name(folder, monkeypatch):
    """Many at once, started from several threads: flock tells apart whoever opens the file on their own."""
    output, results = folder / "out", []
    gate = threading.Barrier(4)

    def attempt():
        gate.wait()
        try:
            with publishing.partial_folder(output) as partial:
                partial.add("a", lambda file: file.write_text("x") and None)
                publishing.publish(partial, output)
            results.append("won")
        except UserError as error:
            results.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("won") == 1
    lost = [result for result in results if result != "won"]
    assert all("Another run is writing" in sentence or "already exists" in sentence for sentence in lost)
    assert sorted(path.name for path in output.iterdir()) == ["a"]
    assert sorted(path.name for path in folder.iterdir()) == ["file", "llama", "loop", "out"]


def test_name_that_was_taken_meanwhile_is_not_replaced(folder):
    with publishing.partial_folder(folder / "out") as partial:
        (folder / "out").mkdir()
        (folder / "out" / "mine").touch()
        with pytest.raises(UserError, match="already exists"):
            publishing.publish(partial, folder / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["file", "llama", "loop", "out"]
    assert (folder / "out" / "mine").exists()


TWICE = """
import sys
from transformer2_cli import main
sys.argv = ["transformer2", "convert", *sys.argv[1:], "--residual", "ddl", "--verify", "L0"]
main()
"""


def test_two_processes_convert_to_one_output(folder):
    arguments = [sys.executable, "-c", TWICE, str(folder / "llama"), str(folder / "out")]
    runs = [subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2]
    (lost,) = [error for run, error in zip(runs, errors, strict=True) if run.returncode]
    assert "Another run is writing" in lost or "already exists" in lost
    assert "Traceback" not in lost
    assert verify(folder / "llama", folder / "out", "L1")["passed"]
    assert sorted(path.name for path in folder.iterdir()) == ["file", "llama", "loop", "out"]
