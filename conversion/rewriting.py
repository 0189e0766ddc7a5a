"""Conversions that do not keep the source's shards: weights in another type, or cut into other files.

Tensors are read, cast and written one after the other through a bounded buffer. A cast source is still a source: its
tensors are those that the cast makes, and everything is checked against them.
"""

import copy
import dataclasses
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer2.conversion.checkpoints import DTYPES, TensorEntry
from transformer2.conversion.layer_stream import read_tensor
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.shards import ITEMSIZE, STORED, Piece, stored_as
from transformer2.errors import UserError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class CastEntry(TensorEntry):
    """A tensor of the source in the type that it is to be written in. `stored` is as it is on disk."""

    stored: TensorEntry | None = None

    def chunks(self) -> Iterator[bytes]:
        """The bytes to write. Raises UserError where the type cannot hold them."""
        return stored_as(self.stored, self.dtype)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def read(self) -> Tensor:
        return read_tensor(self.stored).to(getattr(torch, DTYPES[self.dtype]))


def known_dtype(name: str | None) -> torch.dtype | None:
    """A type by its name; None and "keep" for none. Raises UserError for others."""
    if name in (None, "keep"):
        return None
    if name not in STORED:
        raise UserError(f"Unknown dtype {name!r}; choose one of: keep, {', '.join(STORED)}.")
    return getattr(torch, name)


def parse_size(size: int | str | None) -> int | None:
    """Bytes, from a number or a text such as "5GB" (decimal units). Raises UserError for anything else."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", str(size).strip().upper())
    if match is None or (count := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise UserError(f"Cannot read the shard size {size!r}: write it as 5GB or 500MB, more than nothing.")
    return count


def cast_source(source: LlamaSource, dtype: torch.dtype | None) -> LlamaSource:
    """The source as if it were stored in `dtype`. Raises UserError for a model of ours."""
    if dtype is None or all(DTYPES[entry.dtype] == _name(dtype) for entry in source.checkpoint.tensors.values()):
        return source
    if source.config.model_type == "transformer2":
        raise UserError(
            "The source is a Transformer2 model, parts of which stay float32 in any type: cast the model that it was "
            "made from."
        )
    tensors = {
        name: CastEntry(entry.file, STORED[_name(dtype)], entry.shape, entry.start, entry.end, entry)
        for name, entry in source.checkpoint.tensors.items()
    }
    config = copy.deepcopy(source.config)
    config.dtype = dtype
    checkpoint = dataclasses.replace(source.checkpoint, tensors=tensors)
    return dataclasses.replace(source, checkpoint=checkpoint, config=config, dtype=dtype, cast=True)


def bytes_of(source: LlamaSource) -> int:
    """What its tensors take when they are written."""
    return sum(entry.num_elements * ITEMSIZE[entry.dtype] for entry in source.checkpoint.tensors.values())


def cut_into_shards(source: LlamaSource, max_bytes: int | None) -> list[list[Piece]]:
    """All tensors, in the order in which the source stores them, in shards of at most `max_bytes` (or its own)."""
    order = {shard.name: number for number, shard in enumerate(source.checkpoint.shards)}
    entries = sorted(source.checkpoint.tensors.items(), key=lambda item: (order[item[1].file.name], item[1].start))
    shards: list[list[Piece]] = []
    filled, file = 0, None
    for name, entry in entries:
        size = entry.num_elements * ITEMSIZE[entry.dtype]
        full = entry.file != file if max_bytes is None else filled + size > max_bytes
        if not shards or full:
            shards.append([])
            filled = 0
        filled, file = filled + size, entry.file
        dtype, stored = entry.dtype, getattr(entry, "stored", None) or entry
        shards[-1].append(Piece(name, dtype, entry.shape, Lazy(stored, dtype)))
    return [sorted(shard, key=lambda piece: -ITEMSIZE[piece.dtype]) for shard in shards]  # aligned, else in order


@dataclass(frozen=True)
class Lazy:
    """The bytes of a tensor, read when they are asked for."""

    entry: TensorEntry
    dtype: str

    def __iter__(self) -> Iterator[bytes]:
        return stored_as(self.entry, self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
