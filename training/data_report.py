"""What a run would be trained on: figures about its rows, and the rows themselves with what is learned in them."""

from typing import Any

import numpy as np

from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.training.loading import find_checkpoint, load_tokenizer
from transformer2.training.loss import IGNORED
from transformer2.training.packing import Rows
from transformer2.training.rows import load_rows
from transformer2.training.settings import Settings
from transformer2.training.stages import stages


def _tokenizer(settings: Settings):
    if isinstance(settings.model, dict):
        return load_tokenizer(user_path(settings.model.get("tokenizer", "")))
    return load_tokenizer(find_checkpoint(settings.model))


@plain_os_errors()
def data_stats(settings: Settings) -> dict[str, Any]:
    """Figures about the data of a run: "train" and "held_out" (None without), each with

    documents, tokens, targets, rows, tokens of the shortest, median and longest document, dropped (documents without
    a target), truncated (examples longer than a row), fill (tokens in rows over the room in them) and cut (documents
    that are in more than one piece). For training also steps_per_epoch, and epochs in the steps of the run; of a
    stream the figures are those of its first block. Raises UserError for what `train` would refuse.
    """
    rows, held_out = load_rows(settings, _tokenizer(settings))
    train = _figures(rows.sample())
    if rows.count is None:
        train["stream"] = True
    else:
        train["steps_per_epoch"] = rows.count / settings.optimisation.rows_per_step
        train["epochs"] = sum(s.optimisation.steps for s in stages(settings)) / train["steps_per_epoch"]
    return {"train": train, "held_out": None if held_out is None else _figures(held_out)}


@plain_os_errors()
def data_preview(settings: Settings, num_rows: int = 2) -> list[list[dict[str, Any]]]:
    """The first rows that a run would see, each a list of {"text", "learned", "starts"}: neighbouring tokens alike.

    learned: whether these tokens are targets. starts: whether a document begins here.
    """
    tokenizer = _tokenizer(settings)
    rows, _ = load_rows(settings, tokenizer)
    preview = []
    for row in rows.for_step(0, num_rows, settings.optimisation.seed):
        learned, starts = row.labels != IGNORED, row.position_ids == 0
        cuts = np.unique([0, *np.flatnonzero(np.diff(learned)) + 1, *np.flatnonzero(starts), len(learned)])
        preview.append(
            [
                {
                    "text": tokenizer.decode(row.input_ids[a:b], skip_special_tokens=False),
                    "learned": bool(learned[a]),
                    "starts": bool(starts[a]),
                }
                for a, b in zip(cuts[:-1], cuts[1:], strict=True)
            ]
        )
    return preview


def _figures(rows: Rows) -> dict[str, Any]:
    lengths = np.array(rows.text.lengths)
    tokens = int((rows.ends - rows.starts).sum())
    pieces = np.bincount(np.searchsorted(rows.text.starts, rows.starts, side="right") - 1, minlength=len(lengths))
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "targets": sum(row.num_targets for row in rows),
        "rows": len(rows),
        "shortest": int(lengths.min()),
        "median": float(np.median(lengths)),
        "longest": int(lengths.max()),
        "dropped": rows.dropped,
        "truncated": rows.truncated,
        "cut": int((pieces > 1).sum()),
        "fill": tokens / (len(rows) * rows.length),
    }
