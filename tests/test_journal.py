"""Killed at any point, a conversion leaves the source, an old output and itself in a state to go on from."""

import hashlib
import json
import os
import shutil
import signal
import traceback

import pytest
import torch
from helpers import tiny_llama

from transformer2.conversion import convert, files, publishing, retrofit, shards, verification, verify
from transformer2.conversion.publishing import JOURNAL
from transformer2.errors import UserError

DDL = {"residual": "ddl", "verify": "L1"}
COPY, LINK = {"materialize": "copy"}, {"materialize": "link"}
REWRITE = {"dtype": "bfloat16", "max_shard_size": "40kB"}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_child(function):
    """Run `function` in a forked process; returns the number of the signal that ended it, 0 if none did."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def contents(folder):
    """SHA-256 of every file but the record of the last verification, which holds a time."""
    found = (f for f in folder.rglob("*") if f.is_file() and f.name != "verification.json")
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


def at_message(beginning, number=1):
    """Die when the conversion says so for the n-th time."""

    def start(run):
        left = number

        def progress(message):
            nonlocal left
            left -= message.startswith(beginning)
            if left == 0:
                die()

        run(progress=progress)

    return start


def before(module, name, number=1, after=False):
    """Die before (or after) the n-th call of a function."""

    def start(run):
        original, left = getattr(module, name), number

        def wrapped(*arguments, **keywords):
            nonlocal left
            left -= 1
            if left == 0 and not after:
                die()
            result = original(*arguments, **keywords)
            if left == 0:
                die()
            return result

        setattr(module, name, wrapped)
        run()

    return start


def in_the_middle_of(module, name, target):
    """Die when a file is half written; `target` says which argument is its path."""

    def start(run):
        def half(*arguments):
            arguments[target].write_bytes(b"half of a file")
            die()

        setattr(module, name, half)
        run()

    return start


PHASES = {
    "before anything": (COPY, at_message("Reading the source")),
    "between locking and the journal": (COPY, before(publishing, "_lock", after=True)),
    "before the first shard": (COPY, at_message("model-00001")),
    "within a copy": (COPY, in_the_middle_of(files, "copy", 1)),
    "after a copy, before its line": (COPY, before(publishing, "flush")),
    "between two shards": (COPY, at_message("model-00002")),
    "within the new shard": (COPY, in_the_middle_of(retrofit, "write_shard", 0)),
    "before the index": (COPY, before(retrofit, "build_index")),
    "within the code files": (COPY, before(retrofit, "copy", 4)),
    "before the record": (COPY, before(retrofit, "write_json", 3)),
    "while verifying": (COPY, at_message("Comparing bytes")),
    "before the report": (COPY, before(verification, "write_json")),
    "before publishing": (COPY, at_message("Publishing")),
    "before the rename": (COPY, before(publishing, "swap_in")),
    "after the rename": (COPY, before(publishing, "swap_in", after=True)),
    "links: after one": (LINK, before(os, "link", after=True)),
    "links: between two": (LINK, at_message("model-00002")),
    "links: hashes to be filled in": (LINK, before(os, "replace")),
    "links: before write protection": (LINK, before(retrofit, "protect")),
    "rewriting: within a shard": (REWRITE, in_the_middle_of(retrofit, "write_shard", 0)),
    "rewriting: between two": (REWRITE, at_message("model-00003")),
    "rewriting: before publishing": (REWRITE, at_message("Publishing")),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """A source of three shards, and what undisturbed conversions make of it."""
    folder = tmp_path_factory.mktemp("wanted")
    tiny_llama().save_pretrained(folder / "llama", max_shard_size="40KB")
    results = {}
    for name, options in (("copy", COPY), ("link", LINK), ("rewrite", REWRITE)):
        shutil.copytree(folder / "llama", folder / name)
        convert(folder / name, folder / f"{name}-out", **DDL, **options)
        results[name] = contents(folder / f"{name}-out")
    return folder / "llama", results


@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed(wanted, tmp_path, phase):
    options, start = PHASES[phase]
    kind = options.get("materialize", "rewrite")
    (tmp_path / kind).parent.mkdir(exist_ok=True)
    source, output = shutil.copytree(wanted[0], tmp_path / kind), tmp_path / "out"
    original = contents(source)
    signal_number = in_a_child(lambda: start(lambda **more: convert(source, output, **DDL, **options, **more)))
    assert signal_number == signal.SIGKILL
    assert contents(source) == original
    finished = output.exists()
    assert finished == (phase == "after the rename")
    leftovers = list(tmp_path.glob(".out.partial-*"))
    journalled = []
    if leftovers and (leftovers[0] / JOURNAL).exists():
        lines = (leftovers[0] / JOURNAL).read_text().splitlines()
        journalled = [json.loads(line)["file"] for line in lines[1:]]

    report = convert(source, output, **DDL, **options, resume=True, overwrite=finished)
    assert set(report["resumed_files"]) == set(journalled)
    assert contents(output) == wanted[1][kind]
    assert contents(source) == original
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", kind])
    assert verify(source, output, "L1")["passed"]


REPLACING = {
    "before the old one moves": before(os, "rename", 1),
    "when the old one has moved": before(os, "rename", 1, after=True),
    "before the new one moves": before(os, "rename", 2),
    "when the new one has moved": before(os, "rename", 2, after=True),
    "while the old one is deleted": before(shutil, "rmtree", 1),
}


@pytest.mark.parametrize("moment", REPLACING)
def test_killed_while_replacing(wanted, tmp_path, moment):
    """There always is the old output or the new one, under its name or, until the next run, beside it."""
    source, output = shutil.copytree(wanted[0], tmp_path / "copy"), tmp_path / "out"
    convert(source, output, residual="mudd", verify="L0")
    old, new = contents(output), wanted[1]["copy"]
    start = REPLACING[moment]
    killed = in_a_child(lambda: start(lambda **more: convert(source, output, **DDL, **COPY, overwrite=True, **more)))
    assert killed == signal.SIGKILL
    if output.exists():
        assert contents(output) in (old, new)
    else:
        (aside,) = tmp_path.glob(".out.replaced-*")
        assert contents(aside) == old
        with pytest.raises(UserError, match="already exists"):  # the next run of any kind brings it back
            convert(source, output, **DDL, **COPY)
        assert contents(output) == old
    convert(source, output, **DDL, **COPY, overwrite=True, resume=True)
    assert contents(output) == new
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "out"]


def test_a_linked_file_that_changed_after_the_kill_is_linked_again(wanted, tmp_path):
    source, output = shutil.copytree(wanted[0], tmp_path / "link"), tmp_path / "out"
    killed = in_a_child(lambda: at_message("Verifying")(lambda **more: convert(source, output, **DDL, **LINK, **more)))
    assert killed == signal.SIGKILL
    (leftover,) = tmp_path.glob(".out.partial-*")
    shard = next(leftover.glob("model-00001-of-*"))
    shard.unlink()
    shard.write_bytes(b"x" * (source / "model-00001-of-00004.safetensors").stat().st_size)
    report = convert(source, output, **DDL, **LINK, resume=True)
    assert shard.name not in report["resumed_files"]
    assert contents(output) == wanted[1]["link"]


def test_everything_is_on_the_disk_before_the_rename(wanted, tmp_path, monkeypatch):
    """Every file and folder is flushed before the name appears, and the folder that holds the name after it."""
    source, output = shutil.copytree(wanted[0], tmp_path / "copy"), tmp_path / "out"
    events = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(old, new):
        events.append("RENAMED")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    convert(source, output, **DDL, **COPY)
    at = events.index("RENAMED")
    assert {file.name for file in output.rglob("*")} <= set(events[:at])
    assert tmp_path.name in events[at:]


def test_seeds_and_kills_do_not_change_new_parameters(wanted, tmp_path):
    source = shutil.copytree(wanted[0], tmp_path / "copy")
    convert(source, tmp_path / "other", **DDL, **COPY, seed=1)
    torch.manual_seed(123)
    convert(source, tmp_path / "same", **DDL, **COPY)
    assert contents(tmp_path / "same") == wanted[1]["copy"]
    assert shards.build_header([]).strip().startswith(b"{")
