"""Documents packed into rows of at most one length, which the model keeps apart.

A row says where its documents begin by `position_ids` that start again at 0. Given those, no attention mask and no
cache, the model lets no token see another document. The first token of every document, and of every piece of one,
has no predecessor there, so it is no target.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from transformer2.errors import UserError
from transformer2.training.loss import IGNORED

Packing = Literal["best_fit", "concatenated"]


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

    tokens [N]: of all documents. lengths: tokens of each document. num_bytes [N]: bytes of text of each token.
    is_target [N]: whether a token may be one, or None: all. plain: per document, whether it is running text, which may
    be cut anywhere and gets an end-of-text token; examples with a prompt are neither cut in two nor ended. None: all.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        lengths: list[int],
        num_bytes: np.ndarray | None = None,
        is_target: np.ndarray | None = None,
        plain: np.ndarray | None = None,
    ):
        self.tokens, self.lengths = tokens, lengths
        self.num_bytes = np.zeros_like(tokens) if num_bytes is None else num_bytes
        self.is_target = np.ones(len(tokens), dtype=bool) if is_target is None else is_target
        self.plain = np.ones(len(lengths), dtype=bool) if plain is None else plain
        self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[:-1]  # of each document

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def join(parts: "list[PackedText]") -> "PackedText":
        """The documents of several texts, in order."""
        arrays = (
            np.concatenate([getattr(p, n) for p in parts]) for n in ("tokens", "num_bytes", "is_target", "plain")
        )
        tokens, num_bytes, is_target, plain = arrays
        return PackedText(tokens, sum((p.lengths for p in parts), []), num_bytes, is_target, plain)

    def rows(self, length: int, packing: Packing | None = None) -> "Rows":
        """Rows of at most `length` tokens; those that hold no target are left out.

        packing: "concatenated" (every row full, documents cut where a row ends) or "best_fit" (no document that fits
        into a row is cut; rows are not quite full); None: concatenated where all documents are running text.
        Raises UserError where no row is left.
        """
        rows = Rows(self, length, packing or ("concatenated" if self.plain.all() else "best_fit"))
        if len(rows) == 0:
            raise UserError(
                f"The text has {len(self)} token(s) and nothing to predict: at least one document needs two tokens"
                + ("." if self.is_target.all() else ", the last of them one that counts (a completion, an answer).")
            )
        return rows

    def select(self, documents: list[int]) -> "PackedText":
        """Some of the documents."""
        places = np.concatenate([np.arange(self.starts[d], self.starts[d] + self.lengths[d]) for d in documents])
        return self._taken(places, [self.lengths[d] for d in documents], self.plain[documents])

    def with_end(self, token: int | None) -> "PackedText":
        """Every plain document with an end-of-text token after it, unless it has one already or there is none."""
        if token is None:
            return self
        ends = self.starts + self.lengths
        missing = self.plain & ((np.array(self.lengths) == 0) | (self.tokens[ends - 1] != token))
        ends = ends[missing]
        lengths = (np.array(self.lengths) + missing).tolist()
        inserted = (
            np.insert(a, ends, v) for a, v in ((self.tokens, token), (self.num_bytes, 0), (self.is_target, True))
        )
        return PackedText(next(inserted), lengths, *inserted, self.plain)

    def head(self, num_tokens: int | None) -> "PackedText":
        """The first `num_tokens` tokens."""
        return self if num_tokens is None else self.cut(num_tokens)[0]

    def cut(self, at: int) -> tuple["PackedText", "PackedText"]:
        """The tokens before and after position `at`; a document across it becomes two."""
        at = min(at, len(self))
        ends = np.unique(np.concatenate((self.starts[self.starts > 0], [at, len(self)])))
        before, after = ends[ends <= at], ends[ends > at]
        lengths = np.diff(before, prepend=0).tolist(), np.diff(after, prepend=at).tolist()
        plain = [
            self.plain[np.searchsorted(self.starts, np.maximum(part - 1, 0), side="right") - 1]
            for part in (before, after)
        ]
        places = np.arange(len(self))
        return self._taken(places[:at], lengths[0], plain[0]), self._taken(places[at:], lengths[1], plain[1])

    def _taken(self, places: np.ndarray, lengths: list[int], plain: np.ndarray) -> "PackedText":
        return PackedText(
            self.tokens[places], lengths, self.num_bytes[places], self.is_target[places], np.asarray(plain, dtype=bool)
        )


class Rows:
    """The rows of a packed text, made when asked for.

    Every row is some pieces of documents. dropped: documents that hold no target (any more). truncated: examples with
    a prompt that are longer than a row, of which the rest is left out.
    """

    def __init__(self, text: PackedText, length: int, packing: Packing = "concatenated"):
        self.text, self.length = text, length
        starts, ends = _pieces(text, length, packing == "concatenated")
        self.truncated = int((~text.plain & (np.array(text.lengths) > length)).sum())
        targets = np.concatenate(([0], np.cumsum(text.is_target)))
        has_target = targets[ends] > targets[np.minimum(starts + 1, ends)]  # the first token of a piece is none
        document = np.searchsorted(text.starts, starts, side="right") - 1
        self.dropped = len(text.lengths) - len(np.unique(document[has_target]))
        if packing == "concatenated":
            row = starts // length
            kept = np.isin(row, row[has_target])
        else:
            kept = has_target
            row = np.zeros(len(starts), dtype=np.int64)
            row[kept] = best_fit((ends - starts)[kept], length)
        order = np.argsort(row[kept], kind="stable")
        self.starts, self.ends, row = starts[kept][order], ends[kept][order], row[kept][order]
        self.first = np.concatenate((np.flatnonzero(np.diff(row, prepend=-1)), [len(row)]))  # piece of each row

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, index: int) -> Row:
        text, places = self.text, self._places(index)
        pieces = slice(self.first[index], self.first[index + 1])
        position_ids = np.concatenate([np.arange(n) for n in (self.ends - self.starts)[pieces]])
        input_ids = text.tokens[places].astype(np.int64)
        labels = np.where((position_ids == 0) | ~text.is_target[places], IGNORED, input_ids)
        return Row(input_ids, position_ids, labels, text.num_bytes[places])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def for_step(self, step: int, rows_per_step: int, seed: int) -> list[Row]:
        """The rows of optimiser step `step` (from 0), see `order`."""
        return [self[index] for index in order(step, rows_per_step, len(self), seed)]

    def sample(self) -> "Rows":
        """Some rows to look at before training."""
        return self

    def check_vocabulary(self, size: int) -> None:
        """Raise UserError for a token that a model with `size` of them does not know."""
        if (largest := int(self.text.tokens.max())) >= size:
            raise UserError(
                f"The tokenizer made token {largest}, but the model knows only {size}: they do not belong together."
            )

    @property
    def count(self) -> int | None:
        """How many rows there are, if that is known."""
        return len(self)

    def documents(self, index: int) -> np.ndarray:
        """The document, by number, of every token of a row."""
        return np.searchsorted(self.text.starts, self._places(index), side="right") - 1

    def _places(self, index: int) -> np.ndarray:
        pieces = slice(self.first[index], self.first[index + 1])
        spans = zip(self.starts[pieces], self.ends[pieces], strict=True)
        return np.concatenate([np.arange(start, end) for start, end in spans])


def _pieces(text: PackedText, length: int, concatenated: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the pieces of documents start and end that are at most `length` long, in order.

    Concatenated: cut where a row of `length` tokens ends. Otherwise every document is cut on its own, from its
    beginning, and of an example with a prompt only the first piece counts.
    """
    lengths = np.array(text.lengths, dtype=np.int64)
    if concatenated:
        cuts = np.unique(np.concatenate((text.starts[lengths > 0], np.arange(0, len(text), length), [len(text)])))
        return cuts[:-1], cuts[1:]
    counts = np.where(text.plain, -(-lengths // length), lengths > 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = text.starts[document] + number * length
    return starts, np.minimum(starts + length, (text.starts + lengths)[document])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing (Johnson, 1973): the row of every piece, so that no row exceeds `capacity`.

    The longest piece first, each into the fullest row that still has room for it.
    """
    row, num_rows = np.empty(len(lengths), dtype=np.int64), 0
    with_room: dict[int, list[int]] = {}  # rows by the room that is left in them
    rooms: list[int] = []  # the keys, sorted
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row[piece], room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[place]
            row[piece] = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        left = room - length
        if left not in with_room:
            with_room[left] = []
            bisect.insort(rooms, left)
        with_room[left].append(int(row[piece]))
    return row


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
