"""L0 and L1: is the converted folder made of the right tensors and files, and are the source's bytes untouched?"""

import json
from pathlib import Path

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import DTYPES, INDEX_NAME, PROVENANCE, Checkpoint, file_sha256, read_json
from transformer2.conversion.llama_sources import LlamaSource, some
from transformer2.conversion.new_parameters import new_tensors
from transformer2.conversion.publishing import JOURNAL
from transformer2.conversion.target_config import build_config, config_json
from transformer2.errors import UserError

ALLOWED = {PROVENANCE, "verification.json", "README.md", JOURNAL}  # beyond the files that the conversion lists


def check_structure(source: LlamaSource, output: Checkpoint, config: Transformer2Config) -> dict[str, list[str]]:
    """L0: check name -> what is wrong (empty: nothing). Reads headers only."""
    return {
        "base tensors": _base_tensors(source, output),
        "new tensors": _new_tensors(source, output, config),
        "index": _index(output),
        "config": _config(source, output, config),
        "files": _files(output),
    }


def check_bytes(source: LlamaSource, output: Checkpoint) -> dict[str, list[str]]:
    """L1: SHA-256 of every base tensor and every carried file against the source's."""
    tensors = [
        f"{name} has other bytes than in the source"
        for name, entry in source.checkpoint.tensors.items()
        if name in output.tensors and output.tensors[name].sha256() != entry.sha256()
    ]
    carried = []
    for name, entry in (_planned_files(output) or {}).items():
        if name.endswith(".safetensors") or "from" not in entry:
            continue
        original, file = source.checkpoint.folder / entry["from"], output.folder / name
        if original.is_file() and file.is_file() and file_sha256(original) != file_sha256(file):
            carried.append(f"{name} differs from the source's {entry['from']}")
    return {"tensor bytes": tensors, "carried files": carried}


def _base_tensors(source: LlamaSource, output: Checkpoint) -> list[str]:
    wrong = []
    for name, entry in source.checkpoint.tensors.items():
        found = output.tensors.get(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif (found.shape, found.dtype) != (entry.shape, entry.dtype):
            was, now = f"{entry.dtype} {list(entry.shape)}", f"{found.dtype} {list(found.shape)}"
            wrong.append(f"{name} was {was} and is {now}")
    return wrong


def _new_tensors(source: LlamaSource, output: Checkpoint, config: Transformer2Config) -> list[str]:
    expected = new_tensors(config, source)
    found = {name: entry for name, entry in output.tensors.items() if name not in source.checkpoint.tensors}
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
    metadata = read_json(output.folder / INDEX_NAME).get("metadata", {})
    total = sum(entry.end - entry.start for entry in output.tensors.values())
    return [] if metadata.get("total_size") == total else [f"total_size is {metadata.get('total_size')}, not {total}"]


def _config(source: LlamaSource, output: Checkpoint, loaded: Transformer2Config) -> list[str]:
    stored = read_json(output.folder / "config.json")
    again = json.loads(json.dumps(config_json(loaded)))
    derived = json.loads(json.dumps(config_json(build_config(source, loaded.residual, loaded.local_mixer))))
    wrong = []
    for other, reason in ((again, "does not survive loading"), (derived, "does not follow from the source's config")):
        fields = sorted(name for name in {*stored, *other} if stored.get(name) != other.get(name))
        fields = [name for name in fields if name != "transformers_version"]
        if fields:
            wrong.append(f"{some(fields)} {reason}")
    return wrong


def _files(output: Checkpoint) -> list[str]:
    planned = _planned_files(output)
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


def _planned_files(output: Checkpoint) -> dict[str, dict] | None:
    """What the conversion said that it wrote: name -> size, hash and origin."""
    try:
        files = read_json(output.folder / PROVENANCE).get("files")
    except UserError:
        return None
    return files if isinstance(files, dict) else None


def summary(wrong: list[str]) -> str:
    """The first few complaints."""
    return "ok" if not wrong else some([str(item) for item in wrong])
