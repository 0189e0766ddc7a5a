"""Documents packed one after another into rows of equal length, which the model keeps apart.

A row says where its documents begin by `position_ids` that start again at 0. Given those, no attention mask and no
cache, the model lets no token see another document. The first token of every document, and of every row, has no
predecessor there, so it is no target.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer2.errors import UserError
from transformer2.training.loss import IGNORED


@dataclass
class Row:
    """T tokens of one or more documents: input_ids, position_ids, labels and bytes of text per token, all [T]."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    labels: np.ndarray
    num_bytes: np.ndarray

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORED).sum())


class PackedText:
    """Documents as one long array of tokens.

    tokens [N]: of all documents. lengths: tokens of each document. num_bytes [N]: bytes of text of each
    token, or None.
    """

    def __init__(self, tokens: np.ndarray, lengths: list[int], num_bytes: np.ndarray | None = None):
        self.tokens, self.lengths = tokens, lengths
        self.num_bytes = np.zeros_like(tokens) if num_bytes is None else num_bytes
        self.starts = np.concatenate(([0], np.cumsum(lengths)))[:-1]  # of each document

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, length: int) -> "Rows":
        """Rows of `length` tokens, the last one shorter; the few that hold no target are left out.

        Raises UserError where none is left.
        """
        rows = Rows(self, length)
        if len(rows) == 0:
            raise UserError(
                f"The text has {len(self)} token(s) and nothing to predict: at least one document needs two tokens."
            )
        return rows

    def select(self, documents: list[int]) -> "PackedText":
        """Some of the documents."""
        places = np.concatenate([np.arange(self.starts[d], self.starts[d] + self.lengths[d]) for d in documents])
        return PackedText(self.tokens[places], [self.lengths[d] for d in documents], self.num_bytes[places])

    def with_end(self, token: int | None) -> "PackedText":
        """Every document with an end-of-text token after it, unless it has one already or there is none."""
        if token is None:
            return self
        ends = self.starts + self.lengths
        missing = (np.array(self.lengths) == 0) | (self.tokens[ends - 1] != token)
        ends = ends[missing]
        lengths = (np.array(self.lengths) + missing).tolist()
        return PackedText(np.insert(self.tokens, ends, token), lengths, np.insert(self.num_bytes, ends, 0))

    def head(self, num_tokens: int | None) -> "PackedText":
        """The first `num_tokens` tokens."""
        return self if num_tokens is None else self.cut(num_tokens)[0]

    def cut(self, at: int) -> tuple["PackedText", "PackedText"]:
        """The tokens before and after position `at`; a document across it becomes two."""
        at = min(at, len(self))
        ends = np.unique(np.concatenate((self.starts[self.starts > 0], [at, len(self)])))
        before, after = ends[ends <= at], ends[ends > at]
        lengths = np.diff(before, prepend=0).tolist(), np.diff(after, prepend=at).tolist()
        return (
            PackedText(self.tokens[:at], lengths[0], self.num_bytes[:at]),
            PackedText(self.tokens[at:], lengths[1], self.num_bytes[at:]),
        )


class Rows:
    """The rows of a packed text, made when asked for."""

    def __init__(self, text: PackedText, length: int):
        self.text, self.length = text, length
        starts = np.arange(0, len(text), length)
        self.starts = np.array([start for start in starts if self._row(start).num_targets], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        return self._row(self.starts[index])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def documents(self, index: int) -> np.ndarray:
        """The document, by number, of every token of a row."""
        start = self.starts[index]
        places = np.arange(start, min(start + self.length, len(self.text)))
        return np.searchsorted(self.text.starts, places, side="right") - 1

    def _row(self, start: int) -> Row:
        text, places = self.text, np.arange(start, min(start + self.length, len(self.text)))
        document = np.searchsorted(text.starts, places, side="right") - 1
        position_ids = places - np.maximum(text.starts[document], start)
        input_ids = text.tokens[places].astype(np.int64)
        labels = np.where(position_ids == 0, IGNORED, input_ids)
        return Row(input_ids, position_ids, labels, text.num_bytes[places])


def collate(rows: list[Row], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Rows -> input_ids, position_ids and labels [B, T], shorter rows filled up with a document without targets."""
    length = max(len(row.input_ids) for row in rows)
    batch = {name: [] for name in ("input_ids", "position_ids", "labels")}
    for row in rows:
        missing = length - len(row.input_ids)
        batch["input_ids"].append(np.pad(row.input_ids, (0, missing)))
        batch["position_ids"].append(np.concatenate((row.position_ids, np.arange(missing))))
        batch["labels"].append(np.pad(row.labels, (0, missing), constant_values=IGNORED))
    return {name: torch.from_numpy(np.stack(arrays)).to(device) for name, arrays in batch.items()}


def order(step: int, rows_per_step: int, num_rows: int, seed: int) -> list[int]:
    """The rows of optimiser step `step` (from 0): each epoch is a permutation that depends on seed and epoch alone.

    So a run can be taken up at any step, with any number of processes, and sees the same rows.
    """
    indices, permutations = [], {}
    for place in range(step * rows_per_step, (step + 1) * rows_per_step):
        epoch, position = divmod(place, num_rows)
        if epoch not in permutations:
            permutations[epoch] = np.random.default_rng((seed, epoch)).permutation(num_rows)
        indices.append(int(permutations[epoch][position]))
    return indices
