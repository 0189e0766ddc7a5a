"""Checkpoint folders read from their headers alone: no tensor is loaded, so a model of any size costs nothing.

A safetensors file is 8 bytes of header length, a JSON header, then the tensors' bytes. We read the header ourselves
because verification needs the byte ranges, which the library's reader keeps to itself.
"""

import contextlib
import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer2.conversion.paths import refuse_misplaced, sentence
from transformer2.errors import UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PROVENANCE = "transformer2_conversion.json"  # what a conversion says about itself, and the list of its files
BUFFER_SIZE = 4 * 2**20  # two of them are in memory at times
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_watcher: ContextVar[Callable[[int], None] | None] = ContextVar("watcher", default=None)


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor: its file, its type as safetensors spells it, its shape and its byte range in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def sha256(self) -> str:
        """Hash of the tensor's bytes, read through a bounded buffer."""
        digest = hashlib.sha256()
        for chunk in read_range(self.file, self.start, self.end):
            digest.update(chunk)
        return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its config.json, its shards in order, and every tensor in them."""

    folder: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(shard.stat().st_size for shard in self.shards)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config, index and headers of a folder.

    Raises UserError, in one sentence, for a missing or broken config, index or shard, and without safetensors.
    """
    refuse_misplaced(folder)
    config = read_json(folder / "config.json")
    index_file = folder / INDEX_NAME
    if (folder / SINGLE_NAME).is_file():  # the library looks for this one first
        weight_map, names = None, [SINGLE_NAME]
    elif index_file.is_file():
        weight_map = read_json(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index_file} has no weight_map; download it again.")
        names = sorted(set(weight_map.values()))
    else:
        raise UserError(_without_safetensors(folder))

    tensors: dict[str, TensorEntry] = {}
    for name in names:
        shard = folder / name
        if Path(name).name != name:
            raise UserError(
                f"{index_file} names {name!r}, which is not a file of its own folder; refusing to read it."
            )
        if not shard.is_file():
            raise UserError(
                f"The shard {name} that {index_file.name} lists is missing in {folder}; download it again."
            )
        for tensor, entry in read_header(shard).items():
            if tensor in tensors:
                raise UserError(f"Tensor {tensor} is in both {tensors[tensor].file.name} and {name}; one must go.")
            tensors[tensor] = entry
    if weight_map is not None:
        for tensor, name in weight_map.items():
            if tensor not in tensors or tensors[tensor].file.name != name:
                raise UserError(f"{index_file.name} lists tensor {tensor} in {name}, but it is not there.")
        if unlisted := sorted(set(tensors) - set(weight_map)):
            raise UserError(
                f"{tensors[unlisted[0]].file.name} holds {unlisted[0]}, which {index_file.name} does not list."
            )
    return Checkpoint(folder, config, tuple(folder / name for name in names), tensors)


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file. Raises UserError if the file is truncated or no safetensors file."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if 8 + length > size:
                raise UserError(
                    f"{file} is truncated, its header being cut off, or is no safetensors file; download it again."
                )
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: TensorEntry(
                file, info["dtype"], tuple(info["shape"]), *(8 + length + x for x in info["data_offsets"])
            )
            for name, info in header.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is no readable safetensors file; download it again.") from None
    except OSError as error:
        raise sentence(error.errno, file) from None
    expected = max((entry.end for entry in entries.values()), default=8 + length)
    if expected > size:
        raise UserError(f"{file} is truncated: {size:,} of {expected:,} bytes are there; download it again.")
    if expected < size:
        raise UserError(f"{file} has {size - expected:,} bytes more than its header says; download it again.")
    return entries


def read_provenance(folder: Path) -> dict[str, Any]:
    """What the conversion recorded. Raises UserError where that is missing, or not what a conversion writes."""
    record = read_json(folder / PROVENANCE)
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise UserError(f"{folder / PROVENANCE} is broken: it does not list the files; convert the source again.")
    return record


@contextlib.contextmanager
def watching_bytes(callback: Callable[[int], None]) -> Iterator[None]:
    """`callback` is told meanwhile how many bytes were read from or copied between files."""
    token = _watcher.set(callback)
    try:
        yield
    finally:
        _watcher.reset(token)


def tell_bytes(count: int) -> None:
    """Tell whoever watches that so many bytes were handled."""
    if (callback := _watcher.get()) is not None:
        callback(count)


def read_range(file: Path, start: int, end: int) -> Iterator[bytes]:
    """The bytes [start, end) of a file, a buffer at a time."""
    with open(file, "rb") as stream:
        stream.seek(start)
        while start < end:
            chunk = stream.read(min(BUFFER_SIZE, end - start))
            if not chunk:
                raise UserError(f"{file} ended early; it changed while it was read.")
            start += len(chunk)
            tell_bytes(len(chunk))
            yield chunk


def file_sha256(file: Path) -> str:
    """Hash of a whole file, read through a bounded buffer."""
    digest = hashlib.sha256()
    for chunk in read_range(file, 0, file.stat().st_size):
        digest.update(chunk)
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError, in one sentence, if the file is missing, unreadable or no JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if (file.parent / "adapter_config.json").is_file():
            raise UserError(
                f"{file.parent} holds a PEFT adapter, not a model; merge it into its base first."
            ) from None
        raise UserError(f"{file.parent} has no {file.name}, so it is not a model folder of transformers.") from None
    except OSError as error:
        raise sentence(error.errno, file) from None
    except ValueError:
        raise UserError(f"{file} is not valid JSON; download it again.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} should hold a JSON object.")
    return value


def _without_safetensors(folder: Path) -> str:
    if not any(folder.glob("*.bin")) and not any(folder.glob("*.pt*")):
        if any(folder.glob("*.safetensors")):
            return f"{folder} has shards, but {INDEX_NAME} is missing, which says what is in which; download it, too."
        return f"{folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there."
    target = f"{folder}-safetensors"
    command = (
        f'python -c "from transformers import AutoModelForCausalLM, AutoTokenizer; '
        f"AutoModelForCausalLM.from_pretrained('{folder}', dtype='auto').save_pretrained('{target}'); "
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{target}')\""
    )
    return f"{folder} has no safetensors weights, only pickled ones, which can run code; convert them first: {command}"
