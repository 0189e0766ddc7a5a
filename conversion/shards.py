"""Writing safetensors files tensor by tensor, through a bounded buffer, whatever their size."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from transformer2.conversion.checkpoints import DTYPES, TensorEntry, read_range
from transformer2.errors import UserError

STORED = {torch_name: stored for stored, torch_name in DTYPES.items()}
CAST_AT_ONCE = 2**20  # bytes
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}


class Piece(NamedTuple):
    """One tensor to write: its name, stored type and shape, and where its bytes come from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[bytes]


def build_header(pieces: Iterable[Piece]) -> bytes:
    """The header of a file that holds these tensors in this order, without the eight bytes of its length."""
    start, header = 0, {"__metadata__": {"format": "pt"}}
    for piece in pieces:
        size = torch.Size(piece.shape).numel() * ITEMSIZE[piece.dtype]
        header[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def aligned(pieces: list[Piece]) -> list[Piece]:
    """Wide types first, so that every tensor starts at a multiple of its item size; otherwise the order stays."""
    return sorted(pieces, key=lambda piece: -ITEMSIZE[piece.dtype])


def write_shard(target: Path, pieces: list[Piece], header: bytes | None = None) -> str:
    """Write a safetensors file and return its SHA-256. header: as `build_header` makes it, or one to reproduce."""
    header = build_header(pieces) if header is None else header
    digest = hashlib.sha256()
    with open(target, "wb") as writer:

        def put(chunk: bytes) -> None:
            digest.update(chunk)
            writer.write(chunk)

        put(len(header).to_bytes(8, "little") + header)
        for piece in pieces:
            for chunk in piece.chunks:
                put(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def stored_as_is(entry: TensorEntry) -> Iterator[bytes]:
    """The bytes of a stored tensor."""
    return read_range(entry.file, entry.start, entry.end)


def stored_as(entry: TensorEntry, dtype: str) -> Iterator[bytes]:
    """The bytes of a stored tensor in another type, cast a buffer at a time.

    Raises UserError where a number is too large for the type.
    """
    if dtype == entry.dtype:
        yield from stored_as_is(entry)
        return
    old, new = getattr(torch, DTYPES[entry.dtype]), getattr(torch, DTYPES[dtype])
    for chunk in stored_as_is(entry):  # buffers are whole numbers of items
        for start in range(0, len(chunk), CAST_AT_ONCE):
            values = torch.frombuffer(bytearray(chunk[start : start + CAST_AT_ONCE]), dtype=old)
            cast = values.to(new)
            if (lost := cast.isinf() & ~values.isinf()).any():
                raise UserError(
                    f"A tensor in {entry.file.name} holds {values[lost].abs().max():.3g}, which is too large for "
                    f"{DTYPES[dtype]}; choose another dtype."
                )
            yield to_bytes(cast)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor as safetensors stores them."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def read_header_text(file: Path) -> str:
    """The header of a safetensors file, to the byte, without the eight bytes of its length."""
    with open(file, "rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "little")).decode()
