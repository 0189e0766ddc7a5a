"""A folder that appears complete or not at all: it is built next to its final place and renamed at the end.

While it is built, the folder `.NAME.partial-xxxx` holds a journal with size and hash of every finished file. An error
or Ctrl-C removes the folder; after a kill it stays, for `resume` to go on with or for a plain rerun to replace.
"""

import contextlib
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformer2.conversion.checkpoints import file_sha256
from transformer2.conversion.files import flush
from transformer2.errors import UserError

JOURNAL = ".journal.jsonl"


class PartialFolder:
    """A folder under construction. `add` runs one step per file, unless the journal says that it is done already."""

    def __init__(self, path: Path, journal, finished: dict[str, dict[str, Any]]):
        self.path, self._journal, self.finished = path, journal, finished
        self.reused: list[str] = []

    def add(self, name: str, write: Callable[[Path], str | None]) -> dict[str, Any]:
        """Make the file `name` by `write(path)`, which may return its SHA-256, and return its size and hash."""
        file, known = self.path / name, self.finished.get(name)
        if known and file.is_file() and file.stat().st_size == known["size"] and file_sha256(file) == known["sha256"]:
            self.reused.append(name)
            return known
        file.unlink(missing_ok=True)  # never write through a hard link
        file.parent.mkdir(parents=True, exist_ok=True)
        sha256 = write(file) or file_sha256(file)
        flush(file)
        entry = {"size": file.stat().st_size, "sha256": sha256}
        self._journal.write("\n" + json.dumps({"file": name, **entry}))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        return entry


@contextlib.contextmanager
def partial_folder(output: Path, fingerprint: dict[str, Any], resume: bool) -> Iterator[PartialFolder]:
    """The folder in which `output` is built; gone when this ends, unless `publish` renamed it.

    `fingerprint` says what is being made; a leftover is only gone on with if its own is the same. Raises UserError if
    it is not, or if another process is at work on the same output.
    """
    leftovers = sorted(output.parent.glob(f".{glob.escape(output.name)}.partial-*"))
    path, finished = None, {}
    for leftover in leftovers:
        with open(leftover / JOURNAL, "a+", encoding="utf-8") as journal:
            _lock(journal, output)
            if resume and path is None and (finished := _finished(journal, fingerprint)):
                path = leftover
                continue
        shutil.rmtree(leftover)
    if path is None:
        path = output.parent / f".{output.name}.partial-{secrets.token_hex(4)}"
        path.mkdir(parents=True)
    journal = open(path / JOURNAL, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
    try:
        _lock(journal, output)
        if not finished:
            journal.truncate(0)
            journal.write(json.dumps({"fingerprint": fingerprint}))
            journal.flush()
        yield PartialFolder(path, journal, finished)
    finally:
        journal.close()
        if path.exists():
            shutil.rmtree(path)


def publish(partial: PartialFolder, output: Path) -> None:
    """Give the finished folder its name."""
    (partial.path / JOURNAL).unlink()
    swap_in(partial.path, output)


def swap_in(folder: Path, output: Path) -> None:
    """Rename the finished `folder` to `output`, safe on disk. An older `output` is moved aside first, deleted last."""
    for path, _, _ in os.walk(folder):
        flush(Path(path))
    aside = None
    if output.exists():
        aside = output.parent / f".{output.name}.replaced-{secrets.token_hex(4)}"
        os.rename(output, aside)
    try:
        os.rename(folder, output)
    except OSError:
        if aside is not None:
            os.rename(aside, output)
        raise
    flush(output.parent)
    if aside is not None:
        shutil.rmtree(aside)


def settle_interrupted_swap(output: Path) -> None:
    """Undo, or finish, a `publish` that was killed between its renames, so that no old output is lost or left over."""
    for aside in sorted(output.parent.glob(f".{glob.escape(output.name)}.replaced-*")):
        if output.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, output)


def require_free_name(output: Path, overwrite: bool) -> None:
    """Raise UserError if `output` exists and may not be replaced."""
    if output.is_symlink():
        raise UserError(f"{output} is a symbolic link, which would be replaced; name the folder that it points to.")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another name for the output folder.")
    if output.exists() and any(output.iterdir()) and not overwrite:
        raise UserError(f"{output} already exists; use --overwrite to replace it, or choose another name.")


def _finished(journal, fingerprint: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The finished files of a leftover. A torn last line is what a kill leaves; it is ignored."""
    journal.seek(0)
    records = []
    for line in journal:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    if not records:
        return {}
    if records[0].get("fingerprint") != json.loads(json.dumps(fingerprint)):
        raise UserError(
            "The unfinished conversion was started from another source or with other options; run it without --resume "
            "to start again."
        )
    return {r["file"]: {"size": r["size"], "sha256": r["sha256"]} for r in records[1:]}


def _lock(journal, output: Path) -> None:
    """Held until the file is closed, so also released by a kill."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"Another conversion is writing {output}; wait for it to end.") from None
