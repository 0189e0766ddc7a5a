"""L0 and L1: is the converted folder made of the right tensors and files, and are the source's bytes untouched?"""

import json
import os
import re
from pathlib import Path

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import (
    DTYPES,
    INDEX_NAME,
    PROVENANCE,
    Checkpoint,
    TensorEntry,
    file_sha256,
    read_json,
    read_provenance,
)
from transformer2.conversion.files import replace_json
from transformer2.conversion.llama_sources import LlamaSource, some
from transformer2.conversion.new_parameters import new_tensors
from transformer2.conversion.publishing import JOURNAL
from transformer2.conversion.target_config import build_config, config_json
from transformer2.errors import UserError

# Beyond the files that the conversion lists; the last one is what a kill leaves of `replace_json`.
ALLOWED = {PROVENANCE, "verification.json", "README.md", JOURNAL, f".{PROVENANCE}.new"}


def check_structure(source: LlamaSource, output: Checkpoint, config: Transformer2Config) -> dict[str, list[str]]:
    """L0: check name -> what is wrong (empty: nothing). Reads headers only."""
    return {
        "base tensors": _base_tensors(source, output),
        "new tensors": new_tensor_faults(source, output, config, set(source.checkpoint.tensors)),
        "index": _index(output),
        "config": _config(source, output, config),
        "files": _files(output),
    }


def check_bytes(source: LlamaSource, output: Checkpoint) -> tuple[dict[str, list[str]], dict[str, str]]:
    """L1: SHA-256 of every base tensor and every carried file against the source's, and the hashes of whole shards.

    A shard that is the source's, byte for byte, is read once where it is a link to it, and never tensor by tensor. A
    source in the Hub's cache is also compared with the hashes that the Hub gave it.
    """
    hashes, damaged = {}, []
    proved: set[Path] = set()
    for name, entry in (planned_files(output) or {}).items():
        shard, found = source.checkpoint.folder / entry.get("from", "."), output.folder / name
        if name.endswith(".safetensors") and shard.is_file() and found.is_file():
            hashes[name] = file_sha256(found)
            of_source = hashes[name] if os.path.samefile(shard, found) else file_sha256(shard)
            if hashes[name] == of_source:
                proved.add(found)
            blob = shard.resolve().name  # in the Hub's cache, the hash that the Hub lists
            if re.fullmatch("[0-9a-f]{64}", blob) and blob != of_source:
                damaged.append(f"the source's {shard.name} is not what the Hub has: download it again")
    tensors = [
        f"{name} has other bytes than in the source"
        for name, entry in source.checkpoint.tensors.items()
        if name in output.tensors
        and output.tensors[name].file not in proved
        and output.tensors[name].sha256() != entry.sha256()
    ]
    return {"tensor bytes": damaged + tensors, "carried files": changed_files(source, output)}, hashes


def fill_hashes(output: Checkpoint, hashes: dict[str, str]) -> None:
    """Put into the provenance the hashes of shards that were linked without being read."""
    provenance = read_provenance(output.folder)
    missing = [name for name, entry in provenance["files"].items() if entry.get("sha256") is None and name in hashes]
    for name in missing:
        provenance["files"][name]["sha256"] = hashes[name]
    if missing:
        replace_json(output.folder / PROVENANCE, provenance)


def changed_files(source: LlamaSource, output: Checkpoint) -> list[str]:
    """Files that the conversion took from the source and that differ from it now."""
    carried = []
    for name, entry in (planned_files(output) or {}).items():
        if name.endswith(".safetensors") or "from" not in entry:
            continue
        original, file = source.checkpoint.folder / entry["from"], output.folder / name
        if original.is_file() and file.is_file() and file_sha256(original) != file_sha256(file):
            carried.append(f"{name} differs from the source's {entry['from']}")
    return carried


def _base_tensors(source: LlamaSource, output: Checkpoint) -> list[str]:
    faults = [tensor_fault(name, entry, output.tensors.get(name)) for name, entry in source.checkpoint.tensors.items()]
    return [fault for fault in faults if fault]


def tensor_fault(name: str, entry: TensorEntry, found: TensorEntry | None) -> str | None:
    """What is wrong with `found`, which should have the shape and type of the source's `entry`."""
    if found is None:
        return f"{name} is missing"
    if (found.shape, found.dtype) == (entry.shape, entry.dtype):
        return None
    return f"{name} was {entry.dtype} {list(entry.shape)} and is {found.dtype} {list(found.shape)}"


def new_tensor_faults(
    source: LlamaSource, output: Checkpoint, config: Transformer2Config, known: set[str]
) -> list[str]:
    """What is wrong with the tensors that are not `known`: they must be those that the configuration implies."""
    expected = new_tensors(config, source)
    found = {name: entry for name, entry in output.tensors.items() if name not in known}
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not implied by the config" for name in found if name not in expected]
    for name, (shape, dtype) in expected.items():
        entry = found.get(name)
        stored = None if entry is None else (entry.shape, DTYPES.get(entry.dtype))
        if stored is not None and stored != (shape, str(dtype).removeprefix("torch.")):
            wrong.append(f"{name} should be {dtype} {list(shape)}, and is {entry.dtype} {list(entry.shape)}")
    return wrong


def _index(output: Checkpoint) -> list[str]:
    """Every listed tensor is where the index says, or `open_checkpoint` would have raised; the totals remain."""
    if not (output.folder / INDEX_NAME).is_file():
        return [f"{INDEX_NAME} is missing: this is not the folder as it was converted, but one that was saved again"]
    metadata = read_json(output.folder / INDEX_NAME).get("metadata", {})
    total = sum(entry.end - entry.start for entry in output.tensors.values())
    return [] if metadata.get("total_size") == total else [f"total_size is {metadata.get('total_size')}, not {total}"]


def _config(source: LlamaSource, output: Checkpoint, loaded: Transformer2Config) -> list[str]:
    stored = read_json(output.folder / "config.json")
    again, derived = config_json(loaded), config_json(build_config(source, loaded.residual, loaded.local_mixer))
    wrong = []
    for other, reason in ((again, "does not survive loading"), (derived, "does not follow from the source's config")):
        if fields := config_differences(stored, other):
            wrong.append(f"{some(fields)} {reason}")
    return wrong


def config_differences(one: dict, other: dict) -> list[str]:
    """The fields in which two configurations differ, those aside that say who wrote them from what."""
    one, other = (json.loads(json.dumps(config)) for config in (one, other))
    return sorted(n for n in {*one, *other} - {"transformers_version", "converted_from"} if one.get(n) != other.get(n))


def _files(output: Checkpoint) -> list[str]:
    planned = planned_files(output)
    if planned is None:
        return [f"{PROVENANCE} is missing or broken, so the files cannot be checked"]
    found = {file.relative_to(output.folder).as_posix() for file in output.folder.rglob("*") if file.is_file()}
    found = {name for name in found if "__pycache__" not in name}
    wrong = [f"{name} is missing" for name in planned if name not in found]
    wrong += [f"{name} is not part of the conversion" for name in sorted(found - set(planned) - ALLOWED)]
    for name, entry in planned.items():
        if name in found and (size := Path(output.folder / name).stat().st_size) != entry["size"]:
            wrong.append(f"{name} has {size:,} bytes instead of {entry['size']:,}")
    return wrong


def planned_files(output: Checkpoint) -> dict[str, dict] | None:
    """What the conversion said that it wrote: name -> size, hash and origin."""
    try:
        return read_provenance(output.folder)["files"]
    except UserError:
        return None


def summary(wrong: list[str]) -> str:
    """The first few complaints."""
    return "ok" if not wrong else some([str(item) for item in wrong])
