"""Which run a folder of checkpoints belongs to, and from where to go on."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from transformer2.conversion.checkpoints import open_checkpoint
from transformer2.errors import UserError
from transformer2.training import checkpoints
from transformer2.training.settings import Settings
from transformer2.training.state import load_counters
from transformer2.training.tracking import LOG

SAMPLE = 1 << 20  # bytes at both ends of every weight file
# What may differ between a run and what resumes it: none of it changes what is learned.
FREE = (
    "output",
    "overwrite",
    "resume",
    "checkpoints",
    "tracking",
    "evaluation.rows_per_batch",
    "optimisation.rows_per_batch",
    "optimisation.gradient_checkpointing",
    "optimisation.deterministic",
    "optimisation.on_nan",
)


def run_folder(output: Path) -> Path:
    """Where a run keeps its log, its checkpoints, and what went wrong, until it has succeeded."""
    return output.with_name(f"{output.name}-run")


def identity(settings: Settings, source: Path, rows: Any, precision: str) -> dict[str, Any]:
    """What has to agree for a checkpoint to be gone on with: settings, model and data."""
    flat = {key: value for key, value in _flat(dataclasses.asdict(settings)).items() if not _is_free(key)}
    flat["model"] = Path(settings.model).name  # the folder may have moved; what is in it counts
    flat["optimisation.precision"] = precision
    return {"settings": flat, "model": model_digest(source), "data": _data_digest(rows)}


def model_digest(source: Path) -> str:
    """Of the configuration, the names and shapes of all tensors, and the beginning and end of every weight file."""
    digest = hashlib.sha256()
    for file in sorted({entry.file for entry in open_checkpoint(source).tensors.values()}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as weights:
            digest.update(weights.read(SAMPLE))
            weights.seek(max(0, size - SAMPLE))
            digest.update(weights.read(SAMPLE))
    return digest.hexdigest()


def find_resumable(settings: Settings, folder: Path) -> Path | None:
    """The checkpoint to go on from, or None: then the run begins at its beginning.

    Raises UserError where `resume` is off and there are checkpoints that only `overwrite` may remove.
    """
    present = checkpoints.found(folder) + checkpoints.found(folder, checkpoints.BEST)
    checkpoints.clear_leftovers(folder)
    if settings.resume:
        return checkpoints.newest(folder)
    if present and not settings.overwrite:
        raise UserError(
            f"{folder} holds checkpoints of an earlier run, and resume=false would lose them: name another output, or "
            "add overwrite=true."
        )
    for checkpoint in present:
        checkpoints.remove(checkpoint)
    return None


def check_same_run(checkpoint: Path, about: dict[str, Any]) -> None:
    """Raise UserError, naming what differs, for a checkpoint of another run."""
    _, theirs = load_counters(checkpoint)
    remedy = f"Name another output, or set resume=false with overwrite=true to lose {checkpoint.parent.name}."
    ours = json.loads(json.dumps(about))
    for key in sorted(set(ours["settings"]) | set(theirs["settings"])):
        before, now = theirs["settings"].get(key), ours["settings"].get(key)
        if before != now:
            raise UserError(
                f"{checkpoint.parent} belongs to a run with {key}={before}, and this one has {now}. {remedy}"
            )
    for what in ("model", "data"):
        if ours[what] != theirs[what]:
            raise UserError(f"{checkpoint.parent} belongs to a run on other {_PLURAL[what]}. {remedy}")


def protected_best(folder: Path) -> set[int]:
    """Steps of the best evaluations that checkpoints which may be resumed from refer to."""
    steps = set()
    for checkpoint in checkpoints.found(folder):
        if (checkpoint / checkpoints.MARKER).is_file():
            best = load_counters(checkpoint)[0].best
            steps |= {best["step"]} if best else set()
    return steps


def prune_best(folder: Path, current: int) -> None:
    """Delete the models of evaluations that are the best neither now nor for any checkpoint."""
    wanted = protected_best(folder) | {current}
    for checkpoint in checkpoints.found(folder, checkpoints.BEST):
        if int(checkpoints.BEST.fullmatch(checkpoint.name)[1]) not in wanted:
            checkpoints.remove(checkpoint)


def clear_up(folder: Path, succeeded: bool) -> None:
    """Remove our own files: all of them after a success, else only a log that nothing goes on from."""
    if not folder.is_dir():
        return
    kept = [path for path in folder.iterdir() if path.name != LOG]
    if succeeded:
        for checkpoint in [*checkpoints.found(folder), *checkpoints.found(folder, checkpoints.BEST)]:
            checkpoints.remove(checkpoint)
        checkpoints.clear_leftovers(folder)
    elif kept:
        return
    (folder / LOG).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        os.rmdir(folder)


def take_log(folder: Path, target: Path) -> None:
    """Copy the log of the run to its place in the output."""
    if (folder / LOG).is_file():
        shutil.copyfile(folder / LOG, target / LOG)


_PLURAL = {"model": "weights", "data": "text"}


def _data_digest(rows: Any) -> str | None:
    text = getattr(rows, "text", None)
    if text is None:  # a stream is not read twice
        return None
    digest = hashlib.sha256(np.ascontiguousarray(text.tokens).tobytes())
    digest.update(json.dumps([len(rows), rows.length, np.asarray(text.lengths).tolist()]).encode())
    return digest.hexdigest()


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
