"""A converted folder appears complete or not at all, whatever happens on the way."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
from helpers import tiny_llama
from safetensors import SafetensorError

from transformer2.conversion import convert, files, retrofit, verify
from transformer2.errors import CheckFailed, MachineError, UserError

DDL = {"residual": "ddl", "verify": "L0"}
BASE, NEW = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def beside(folder):
    return sorted(file.name for file in folder.parent.iterdir())


def test_existing_output_is_replaced_only_on_request(llama_folder, tmp_path):
    output = tmp_path / "out"
    convert(llama_folder, output, **DDL)
    (output / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="already exists; choose another name, or replace it .overwrite=True"):
        convert(llama_folder, output, residual="short_swa", verify="L0")
    with pytest.raises(UserError, match="already exists; choose another name, or replace it .overwrite=True"):
        convert(llama_folder, output, **DDL, resume=True)
    assert (output / "mine.txt").read_text() == "precious"
    convert(llama_folder, output, residual="short_swa", verify="L0", overwrite=True)
    assert json.loads((output / "config.json").read_text())["residual"]["type"] == "short_swa"
    assert not (output / "mine.txt").exists()
    assert beside(output) == ["llama", "out"]


@pytest.mark.parametrize("name", [".", "..", "../.."])
def test_the_current_folder_is_never_replaced(name, llama_folder, tmp_path, monkeypatch):
    here = tmp_path / "a" / "here"
    here.mkdir(parents=True)
    (here / "precious.txt").write_text("kept")
    monkeypatch.chdir(here)
    with pytest.raises(UserError, match="is the current folder or one around it"):
        convert(llama_folder, name, **DDL, overwrite=True)
    assert (here / "precious.txt").read_text() == "kept"


def test_only_models_are_replaced(llama_folder, tmp_path):
    output = tmp_path / "documents"
    output.mkdir()
    (output / "thesis.txt").write_text("kept")
    with pytest.raises(UserError, match="holds no model .no config.json., so it is not replaced"):
        convert(llama_folder, output, **DDL, overwrite=True)
    assert (output / "thesis.txt").read_text() == "kept"


def test_failed_overwrite_leaves_the_old_output(llama_folder, tmp_path, monkeypatch):
    output = tmp_path / "out"
    convert(llama_folder, output, **DDL)
    monkeypatch.setattr(retrofit, "run_checks", lambda *a, **k: {"passed": False, "failures": ["L0 index: bad"]})
    with pytest.raises(CheckFailed, match="Verification failed, so nothing was written: L0 index: bad") as error:
        convert(llama_folder, output, residual="short_swa", verify="L0", overwrite=True)
    assert error.value.exit_code == 1
    assert json.loads((output / "config.json").read_text())["residual"]["type"] == "ddl"
    assert beside(output) == ["llama", "out"]


def test_swap_that_was_killed_in_the_middle(llama_folder, tmp_path):
    output, aside = tmp_path / "out[1]", tmp_path / ".out[1].replaced-0123abcd"
    convert(llama_folder, aside, **DDL)
    with pytest.raises(UserError, match="already exists"):
        convert(llama_folder, output, residual="short_swa", verify="L0")
    assert json.loads((output / "config.json").read_text())["residual"]["type"] == "ddl"
    shutil.copytree(output, aside)  # and now one that was killed while it deleted the old output
    convert(llama_folder, output, residual="short_swa", verify="L0", overwrite=True)
    assert json.loads((output / "config.json").read_text())["residual"]["type"] == "short_swa"
    assert beside(output) == ["llama", "out[1]"]


def test_output_and_source_may_not_overlap(llama_folder, tmp_path):
    for output in (llama_folder, llama_folder / "inside", tmp_path):
        with pytest.raises(UserError, match="overlap|holds no model|transformer2 has not written"):
            convert(llama_folder, output, **DDL, overwrite=True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="is a file; choose another name"):
        convert(llama_folder, file, **DDL, overwrite=True)
    assert beside(llama_folder) == ["file", "llama"]


def test_wrong_logits_leave_no_output(llama_folder, tmp_path, monkeypatch):
    initialise = retrofit.initialise

    def perturbed(*args):
        tensors = initialise(*args)
        tensors["model.layers.1.mlp_residual.rewrite.gate.bias"] += 1e-3
        return tensors

    monkeypatch.setattr(retrofit, "initialise", perturbed)
    with pytest.raises(CheckFailed, match=r"L2 float32 short: logits differ by .* first in layer 1 "):
        convert(llama_folder, tmp_path / "out", residual="ddl", verify="L2")
    assert beside(llama_folder) == ["llama"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("bug")])
def test_interruption_leaves_nothing(llama_folder, tmp_path, failure):
    def progress(message):
        if message.startswith("Verifying"):
            assert len(beside(llama_folder)) == 2
            raise failure

    with pytest.raises(type(failure)):
        convert(llama_folder, tmp_path / "out", **DDL, progress=progress)
    assert beside(llama_folder) == ["llama"]


def test_full_disk_is_noticed_before_writing(llama_folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"0 MB free and 67 MB are needed; free some space") as error:
        convert(llama_folder, tmp_path / "out", **DDL)
    assert error.value.exit_code == 3
    assert beside(llama_folder) == ["llama"]


@pytest.mark.parametrize("step", ["place", "write_json", "_write_new"])
def test_disk_that_fills_up_while_writing(llama_folder, tmp_path, monkeypatch, step):
    def full(*args):
        if step == "_write_new":  # how safetensors says it
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(retrofit, step, full)
    with pytest.raises(MachineError, match="The disk of .* is full"):
        convert(llama_folder, tmp_path / "out", **DDL)
    assert beside(llama_folder) == ["llama"]


def test_real_write_error_of_the_copy(llama_folder, tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(MachineError, match="is full"):
        convert(llama_folder, tmp_path / "out", **DDL)
    assert beside(llama_folder) == ["llama"]


def test_no_permission(llama_folder, tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere")

    monkeypatch.setattr(retrofit, "place", denied)
    with pytest.raises(UserError, match="somewhere cannot be accessed .Permission denied.; check its permissions"):
        convert(llama_folder, tmp_path / "out", **DDL)


def test_links_and_copies(llama_folder, tmp_path):
    weights = llama_folder / "model.safetensors"
    mode = weights.stat().st_mode
    assert mode & 0o200
    report = convert(llama_folder, tmp_path / "linked", **DDL, materialize="link")
    assert report["materialized"] == "link"
    assert "hard links" in report["warnings"][0]
    assert (tmp_path / "linked" / BASE).samefile(weights)
    assert weights.stat().st_mode == mode & ~0o222  # what writes into one of the two changes both
    assert (tmp_path / "linked" / NEW).stat().st_mode & 0o200
    report = convert(llama_folder, tmp_path / "copied", **DDL, materialize="copy")
    assert report["materialized"] == "copy"
    assert report["warnings"] == []
    assert not (tmp_path / "copied" / BASE).samefile(weights)
    shutil.rmtree(tmp_path / "linked")
    assert verify(llama_folder, tmp_path / "copied", "L1")["passed"]


def test_clones_where_the_file_system_can(llama_folder, tmp_path, monkeypatch):
    def unable(source, target):
        target.touch()
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(files, "clone", unable)
    assert convert(llama_folder, tmp_path / "a", **DDL)["materialized"] == "copy"
    with pytest.raises(MachineError, match="cannot clone files .* use materialize='copy', or --materialize copy"):
        convert(llama_folder, tmp_path / "b", **DDL, materialize="reflink")
    monkeypatch.setattr(files, "clone", shutil.copyfile)  # what a clone looks like from outside
    assert convert(llama_folder, tmp_path / "c", **DDL)["materialized"] == "reflink"
    assert verify(llama_folder, tmp_path / "c", "L1")["passed"]
    assert beside(llama_folder) == ["a", "c", "llama"]


def test_link_across_file_systems(llama_folder, tmp_path, monkeypatch):
    def link(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(MachineError, match="cannot be hard-linked .* use materialize='copy', or --materialize copy"):
        convert(llama_folder, tmp_path / "out", **DDL, materialize="link")
    assert beside(llama_folder) == ["llama"]


KILLED = """
import os, signal, sys
from transformer2.conversion import convert

def progress(message):
    if message.startswith("Verifying"):
        os.kill(os.getpid(), signal.SIGKILL)

convert(sys.argv[1], sys.argv[2], residual="ddl", verify="L0", progress=progress)
"""


@pytest.fixture(scope="module")
def after_a_kill(tmp_path_factory):
    """A folder with a source and the leftover of a conversion that was killed before its verification."""
    folder = tmp_path_factory.mktemp("killed")
    tiny_llama().save_pretrained(folder / "llama")
    run = subprocess.run([sys.executable, "-c", KILLED, str(folder / "llama"), str(folder / "out")], cwd=folder)
    assert run.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def killed(after_a_kill, tmp_path):
    shutil.copytree(after_a_kill, tmp_path / "work")
    source, (leftover,) = tmp_path / "work" / "llama", (tmp_path / "work").glob(".out.partial-*")
    stat = (after_a_kill / "llama" / "model.safetensors").stat()
    os.utime(source / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert beside(source) == [leftover.name, "llama"]
    return source, leftover


def test_resume_keeps_what_is_done(killed, monkeypatch):
    source, leftover = killed
    output = source.parent / "out"
    written = (leftover / BASE).stat().st_ino
    (leftover / NEW).write_bytes(b"damaged after the kill")
    usage = namedtuple("usage", "free")(64 * 2**20)  # nothing is needed for what is there already
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = convert(source, output, **DDL, resume=True)
    assert BASE in report["resumed_files"]
    assert NEW not in report["resumed_files"]
    assert (output / BASE).stat().st_ino == written
    assert beside(source) == ["llama", "out"]
    assert verify(source, output, "L3", fresh_process=False)["passed"]


def test_resume_with_a_torn_journal(killed):
    source, leftover = killed
    journal = leftover / ".journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:2]) + '\n{"file": "model-00002-of')
    report = convert(source, source.parent / "out", **DDL, resume=True)
    assert report["resumed_files"] == [BASE]
    assert verify(source, source.parent / "out", "L1")["passed"]


def test_plain_rerun_starts_again(killed):
    source, leftover = killed
    report = convert(source, source.parent / "out", **DDL)
    assert report["resumed_files"] == []
    assert beside(source) == ["llama", "out"]


def test_resume_with_other_options_is_refused(killed):
    source, leftover = killed
    with pytest.raises(UserError, match="other options; run it without resume"):
        convert(source, source.parent / "out", residual="short_swa", verify="L0", resume=True)
    assert leftover.exists()


def test_two_conversions_at_once(killed):
    source, leftover = killed
    with open(leftover / ".journal.jsonl", "a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another run is writing"):
            convert(source, source.parent / "out", **DDL)
    assert leftover.exists()


def test_resume_without_a_leftover_just_starts(llama_folder, tmp_path):
    assert convert(llama_folder, tmp_path / "out", **DDL, resume=True)["resumed_files"] == []
