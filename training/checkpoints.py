"""Checkpoints of a run on disk: each appears complete or not at all, and the only complete one is never deleted.

A checkpoint is built under another name, gets a file COMPLETE with size and hash of everything in it, and is renamed.
Whatever lacks that file, or does not agree with it, is not resumed from: it is what a kill, or a full disk, left.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer2.conversion.checkpoints import file_sha256
from transformer2.conversion.files import flush

MARKER = "COMPLETE"
STEP = re.compile(r"step-(\d{8})")
BEST = re.compile(r"best-(\d{8})")


def write_checkpoint(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Make the checkpoint `name` in `folder`, by `build(new folder)`. One that is complete already stays."""
    final = folder / name
    if is_complete(final):
        return final
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        build(partial)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        entries = {
            str(path.relative_to(partial)): {"size": path.stat().st_size, "sha256": file_sha256(path)}
            for path in files
        }
        for path in files:
            flush(path)
        marker = partial / MARKER
        marker.write_text(json.dumps(entries, indent=1), encoding="utf-8")
        flush(marker)
        flush(partial)
        if final.exists():  # not complete
            remove(final)
        os.rename(partial, final)
        flush(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def is_complete(checkpoint: Path) -> bool:
    """Whether everything that COMPLETE lists is there, with its size and hash."""
    try:
        entries: dict[str, dict[str, Any]] = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        return all(
            (file := checkpoint / name).stat().st_size == entry["size"] and file_sha256(file) == entry["sha256"]
            for name, entry in entries.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest(folder: Path, kind: re.Pattern = STEP) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next((checkpoint for checkpoint in reversed(found(folder, kind)) if is_complete(checkpoint)), None)


def found(folder: Path, kind: re.Pattern = STEP) -> list[Path]:
    """The checkpoints of a kind by step, complete or not."""
    return sorted(path for path in folder.glob("*") if kind.fullmatch(path.name)) if folder.is_dir() else []


def rotate(folder: Path, keep: int, kind: re.Pattern = STEP) -> None:
    """Delete all but the `keep` newest complete checkpoints of a kind. Incomplete ones do not count, and stay."""
    complete = [checkpoint for checkpoint in found(folder, kind) if (checkpoint / MARKER).is_file()]
    if not complete or not is_complete(complete[-1]):  # then an older one may be the only one that is good
        return
    for checkpoint in complete[: -max(1, keep)]:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its marker first, so that half of it never looks like all of it."""
    with contextlib.suppress(FileNotFoundError):
        (checkpoint / MARKER).unlink()
    shutil.rmtree(checkpoint, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed run was in the middle of writing."""
    for partial in folder.glob(".*.partial-*") if folder.is_dir() else ():
        shutil.rmtree(partial, ignore_errors=True)
