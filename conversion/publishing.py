"""A folder that appears complete or not at all: it is built next to its final place and renamed at the end.

While it is built, the folder `.NAME.partial-xxxx` holds a journal with size and hash of every finished file. An error
or Ctrl-C removes the folder; after a kill it stays, for `resume` to go on with or for a plain rerun to replace.

Of several runs that want the same name, one gets it: the journal of a run at work is locked, and whoever looks for
leftovers, starts or publishes holds a lock on the folder above meanwhile. Both locks end with their process.
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

from transformer2.conversion.checkpoints import PROVENANCE, file_sha256, read_json
from transformer2.conversion.files import flush
from transformer2.conversion.paths import parents_for, sentence
from transformer2.errors import UserError

try:
    import fcntl
except ImportError:  # no locks on this system
    fcntl = None

JOURNAL = ".journal.jsonl"
# One of these is in every folder that we write, whatever the model is.
OURS = (PROVENANCE, "training_report.json", "transformer2_preset.json", "dequantisation.json")


class PartialFolder:
    """A folder under construction. `add` runs one step per file, unless the journal says that it is done already."""

    def __init__(self, path: Path, journal, finished: dict[str, dict[str, Any]], overwrite: bool, plain: bool):
        self.path, self._journal, self.finished, self.overwrite = path, journal, finished, overwrite
        self.plain = plain
        self.reused: list[str] = []

    def add(self, name: str, write: Callable[[Path], str | None], hashed: bool = True) -> dict[str, Any]:
        """Make the file `name` by `write(path)`, which may return its SHA-256, and return its size and hash.

        hashed=False is for links, whose bytes are not read: size, time and inode stand for them, the hash is None.
        """
        file, known = self.path / name, self.finished.get(name)
        if known and _as_journalled(file, known):
            self.reused.append(name)
            return {"size": known["size"], "sha256": known["sha256"]}
        file.unlink(missing_ok=True)  # never write through a hard link
        file.parent.mkdir(parents=True, exist_ok=True)
        sha256 = write(file)
        if hashed:
            sha256 = sha256 or file_sha256(file)
            flush(file)
        stat = file.stat()
        entry = {"size": stat.st_size, "sha256": sha256}
        identity = {} if hashed else {"inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns}
        self._journal.write("\n" + json.dumps({"file": name, **entry, **identity}))
        self._journal.flush()
        os.fsync(self._journal.fileno())
        return entry


def _as_journalled(file: Path, known: dict[str, Any]) -> bool:
    """Whether a file is still what the journal says."""
    if not file.is_file() or (stat := file.stat()).st_size != known["size"]:
        return False
    if known["sha256"] is None:
        return (stat.st_ino, stat.st_mtime_ns) == (known.get("inode"), known.get("mtime_ns"))
    return file_sha256(file) == known["sha256"]


@contextlib.contextmanager
def partial_folder(
    output: Path,
    fingerprint: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
    resume: bool = False,
    plain: bool = False,
) -> Iterator[PartialFolder]:
    """The folder in which `output` is built; gone when this ends, unless `publish` renamed it.

    `fingerprint` says what is being made; a leftover is only gone on with if its own is the same. Raises UserError if
    it is not, if another process is at work on the same output, or if `output` exists and may not be replaced: what
    transformer2 has not written never is, unless a `plain` model may be, which bears no mark of who wrote it.
    """
    path = journal = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(parents_for(output))
        try:
            with _one_at_a_time(output.parent):
                _settle(output)
                _require_free(output, overwrite, plain)
                path, finished = _take_leftover(output, fingerprint, resume)
                if path is None:
                    path = output.parent / f".{output.name}.partial-{secrets.token_hex(4)}"
                    _make(path, output)
                journal = open(path / JOURNAL, "a+", encoding="utf-8")  # noqa: SIM115 (closed below)
                _lock(journal, output)
            if not finished:
                journal.truncate(0)
                journal.write(json.dumps({"fingerprint": fingerprint}))
                journal.flush()
            yield PartialFolder(path, journal, finished, overwrite, plain)
        finally:
            if path is not None and path.exists():
                shutil.rmtree(path)
            if journal is not None:
                journal.close()


def publish(partial: PartialFolder, output: Path) -> None:
    """Give the finished folder its name."""
    with _one_at_a_time(output.parent):
        _require_free(output, partial.overwrite, partial.plain)
        (partial.path / JOURNAL).unlink()
        swap_in(partial.path, output)


def swap_in(folder: Path, output: Path) -> None:
    """Rename the finished `folder` to `output`, safe on disk. An older `output` is moved aside first, deleted last."""
    for path, _, names in os.walk(folder):
        for file in (*names, "."):
            flush(Path(path) / file)
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
        discard(aside)


def discard(folder: Path) -> None:
    """Delete an old output that was to be replaced, though parts of it be read-only."""
    for path, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)  # whatever is left blocks nothing: it is tried again next time


def require_free_name(output: Path, overwrite: bool, plain: bool = False) -> None:
    """Raise UserError if `output` exists and may not be replaced; an old one that a killed run lost comes back."""
    if output.parent.is_dir():
        with _one_at_a_time(output.parent):
            _settle(output)
    _require_free(output, overwrite, plain)


def _settle(output: Path) -> None:
    """Undo, or finish, a `publish` that was killed between its renames, so that no old output is lost or left over."""
    for aside in sorted(output.parent.glob(f".{glob.escape(output.name)}.replaced-*")):
        if output.exists():
            discard(aside)
        else:
            os.rename(aside, output)


def _require_free(output: Path, overwrite: bool, plain: bool) -> None:
    here = Path.cwd()
    if output.resolve() in (here, *here.parents):
        raise UserError(f"The output {str(output)!r} is the current folder or one around it; name a new folder.")
    for parent in output.parents:
        if parent.exists() and not parent.is_dir():
            raise UserError(f"{parent} is a file, so there can be no folder {output}; choose another name.")
    if output.is_symlink():
        raise UserError(f"{output} is a symbolic link, which would be replaced; name the folder that it points to.")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another name for the output folder.")
    if not output.exists() or not any(output.iterdir()):
        return
    if overwrite and not (output / "config.json").is_file():
        raise UserError(f"{output} holds no model (no config.json), so it is not replaced; choose another name.")
    if overwrite and not plain and not _is_ours(output):
        raise UserError(
            f"{output} holds a model that transformer2 has not written, so it is not replaced; move it away, or "
            "choose another name."
        )
    if overwrite and not os.access(output, os.W_OK):
        raise UserError(f"{output} is read-only, so it is not replaced; make it writable, or choose another name.")
    if not overwrite:
        raise UserError(
            f"{output} already exists; choose another name, or replace it (overwrite=True in Python, --overwrite for "
            "`convert`, overwrite=true for `train`)."
        )


def _is_ours(output: Path) -> bool:
    if any((output / name).is_file() for name in OURS):
        return True
    with contextlib.suppress(UserError):
        return read_json(output / "config.json").get("model_type") == "transformer2"
    return False


def _take_leftover(
    output: Path, fingerprint: dict[str, Any] | None, resume: bool
) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """With `resume`, the folder of a killed run to go on with, and its finished files; other leftovers go."""
    path, finished = None, {}
    for leftover in sorted(output.parent.glob(f".{glob.escape(output.name)}.partial-*")):
        with open(leftover / JOURNAL, "a+", encoding="utf-8") as journal:
            _lock(journal, output)
            if resume and path is None and (finished := _finished(journal, fingerprint)):
                path = leftover
                _remove_unfinished(path, set(finished))
                continue
        shutil.rmtree(leftover)
    return path, finished


def _remove_unfinished(folder: Path, finished: set[str]) -> None:
    """Files that the killed run had begun, or written for itself alone."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.relative_to(folder).as_posix() not in {JOURNAL, *finished}:
            file.unlink()


def _make(path: Path, output: Path) -> None:
    """The new folder; what goes wrong is said of the name that the user knows."""
    try:
        path.mkdir()
    except OSError as error:
        raise sentence(error.errno, output) from error


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
            "The unfinished conversion was started from another source or with other options; run it without resume "
            "(--resume on the command line) to start again."
        )
    return {record["file"]: record for record in records[1:]}


def _lock(journal, output: Path) -> None:
    """Held until the file is closed, so also released by a kill."""
    if fcntl is None:
        return
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UserError(f"Another run is writing {output}; wait for it to end, or choose another name.") from None


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A lock on `folder`, waited for: looking for a name and taking it must be one act."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
