"""The way back: from a converted folder to the plain checkpoint that it was made from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import (
    INDEX_NAME,
    PROVENANCE,
    SINGLE_NAME,
    Checkpoint,
    TensorEntry,
    file_sha256,
    open_checkpoint,
    read_json,
    read_provenance,
)
from transformer2.conversion.computed import compare_logits, exceeds_memory
from transformer2.conversion.files import copy, write_json, write_text
from transformer2.conversion.index import build_index
from transformer2.conversion.llama_sources import EMBEDDING, HEAD, check_llama, some
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.conversion.publishing import PartialFolder, partial_folder, publish, require_free_name
from transformer2.conversion.results import Stripped
from transformer2.conversion.shards import Piece, stored_as_is, write_shard
from transformer2.errors import CheckFailed, UserError

DTYPE_FIELDS = ("dtype", "torch_dtype")


@plain_os_errors()
def strip(
    folder: str | Path,
    output: str | Path,
    *,
    overwrite: bool = False,
    stream_layers: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Stripped:
    """Write the plain checkpoint that `folder` was converted from into the new folder `output`.

    While no pretrained tensor was trained, this gives every file back with its old bytes, which the hashes of the
    conversion prove; new parameters may have been trained, and are dropped. Otherwise the trained tensors are exported
    as a plain checkpoint, if that computes the same logits as `folder`, which is proved first.

    Raises UserError for bad input, CheckFailed if the plain checkpoint would compute something else; then there is no
    output.
    """
    say = progress or (lambda message: None)
    folder, output = user_path(folder), Path(os.path.abspath(user_path(output)))
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}.")
    with plain_os_errors(output.parent):
        require_free_name(output, overwrite, plain=True)
        converted, provenance = open_checkpoint(folder), _provenance(folder)
        if folder.resolve() in (output.resolve(), *output.resolve().parents):
            raise UserError(
                f"The output {output} and the converted folder {folder} overlap; choose a folder elsewhere."
            )
        with partial_folder(output, overwrite=overwrite, plain=True) as partial:
            report = _restore(partial, converted, provenance, say) or _export(
                partial, converted, provenance, stream_layers, say
            )
            say("Publishing")
            publish(partial, output)
    return {**report, "output": str(output)}


def _provenance(folder: Path) -> dict[str, Any]:
    if read_json(folder / "config.json").get("model_type") != "transformer2":
        raise UserError(f"{folder} is no Transformer2 checkpoint, so there is nothing to strip.")
    if not (folder / PROVENANCE).is_file():
        raise UserError(f"{folder} was not converted from a plain checkpoint ({PROVENANCE} is missing).")
    provenance = read_provenance(folder)
    if "original" not in provenance:
        raise UserError(
            f"{folder} was converted by version {provenance.get('tool_version')}, which kept too little of the source "
            "for the way back; convert the source again."
        )
    return provenance


def _restore(
    partial: PartialFolder, converted: Checkpoint, provenance: dict[str, Any], say: Callable[[str], None]
) -> Stripped | None:
    """The source's own shards, or None if some tensor has changed since."""
    recorded = {
        entry["from"]: entry["sha256"]
        for name, entry in provenance["files"].items()
        if name.endswith(".safetensors") and "from" in entry
    }
    headers = provenance["original"]["headers"]
    recorded |= provenance["original"].get("sha256", {})
    if set(recorded) != set(headers):  # the conversion cast or re-sharded
        return None
    if unread := [name for name, sha256 in recorded.items() if sha256 is None]:
        raise UserError(
            f"The hash of {unread[0]} is unknown, because the shards were linked without being read; run "
            "`transformer2 verify SOURCE FOLDER --level L1`, which fills it in."
        )
    for shard, header in headers.items():
        say(f"{shard}: restoring")
        pieces = _pieces(header, converted)
        written = None
        if pieces is not None:
            written = partial.add(shard, lambda target, p=pieces, h=header: write_shard(target, p, h.encode()))
        if written is None or written["sha256"] != recorded[shard]:
            for name in headers:
                (partial.path / name).unlink(missing_ok=True)
            return None
    for name, text in provenance["original"]["files"].items():
        partial.add(name, lambda target, text=text: write_text(target, text))
    missing, changed = _side_files(partial, converted.folder, provenance)
    warnings = [f"{some(missing)}: not in the converted folder any more, so not restored."] if missing else []
    if changed:
        warnings.append(f"{some(changed)}: changed since the conversion, and carried over as they are now.")
    if (converted.folder / "training_report.json").is_file():
        warnings.append("The training of the new parameters is gone with them: this is the source as it was.")
    return {
        "identical": not missing and not changed,
        "tensors": sum(len(_tensors(header)) for header in headers.values()),
        "files": sorted(file.name for file in partial.path.iterdir() if not file.name.startswith(".")),
        "warnings": warnings,
    }


def _export(
    partial: PartialFolder,
    converted: Checkpoint,
    provenance: dict[str, Any],
    stream_layers: bool | None,
    say: Callable[[str], None],
) -> Stripped:
    """The pretrained tensors as they are now, if they alone compute what the converted model computes."""
    new, config = set(provenance["new_tensors"]), Transformer2Config.from_pretrained(converted.folder)
    kept: dict[Path, list[Piece]] = {}
    for name, entry in converted.tensors.items():
        if name not in new:
            kept.setdefault(entry.file, []).append(Piece(name, entry.dtype, entry.shape, stored_as_is(entry)))
    names = []
    for number, pieces in enumerate(kept.values(), 1):
        names.append(SINGLE_NAME if len(kept) == 1 else f"model-{number:05d}-of-{len(kept):05d}.safetensors")
        say(f"{names[-1]}: {len(pieces)} tensors")
        partial.add(names[-1], lambda target, pieces=pieces: write_shard(target, pieces))
    if len(names) > 1:
        index = build_index([partial.path / name for name in names], config.tie_word_embeddings)
        partial.add(INDEX_NAME, lambda target: write_json(target, index))
    settings = json.loads(provenance["original"]["files"]["config.json"])
    settings["tie_word_embeddings"] = config.tie_word_embeddings
    for field in DTYPE_FIELDS:
        if field in settings:
            settings[field] = str(config.dtype).removeprefix("torch.")
    partial.add("config.json", lambda target: write_json(target, settings))
    missing, _ = _side_files(partial, converted.folder, provenance)

    plain = check_llama(open_checkpoint(partial.path))
    if stream_layers is None:
        stream_layers = exceeds_memory(plain)
    say("Comparing logits")
    results = {}
    for dtype in dict.fromkeys((torch.float32, plain.dtype)):
        for probe, (passed, detail, figures) in compare_logits(plain, converted, dtype, stream_layers, say).items():
            results[f"{str(dtype).removeprefix('torch.')} {probe}"] = {**figures, "passed": passed}
            if not passed:
                raise CheckFailed(
                    f"Without its new parameters the model would compute something else ({detail}), and its "
                    "pretrained ones were trained too, so no plain checkpoint equals it; nothing was written."
                )
    warnings = ["Pretrained tensors differ from the source's: this is an export of them, not the source."]
    if missing:
        warnings.append(f"{some(missing)}: not in the converted folder any more, so not restored.")
    return {
        "identical": False,
        "tensors": sum(map(len, kept.values())),
        "files": sorted(file.name for file in partial.path.iterdir() if not file.name.startswith(".")),
        "warnings": warnings,
        "logits": results,
    }


def _pieces(header: str, converted: Checkpoint) -> list[Piece] | None:
    """The tensors of a shard of the source, in their old order, or None if one is there no more."""
    pieces = []
    for name, info in sorted(_tensors(header).items(), key=lambda item: item[1]["data_offsets"]):
        entry = _counterpart(name, converted)
        if entry is None or (entry.dtype, list(entry.shape)) != (info["dtype"], info["shape"]):
            return None
        pieces.append(Piece(name, entry.dtype, entry.shape, stored_as_is(entry)))
    return pieces


def _tensors(header: str) -> dict[str, dict[str, Any]]:
    return {name: info for name, info in json.loads(header).items() if name != "__metadata__"}


def _counterpart(name: str, converted: Checkpoint) -> TensorEntry | None:
    """A tensor by its name or, where training saved tied embeddings once, by the other one."""
    if name not in converted.tensors and converted.config.get("tie_word_embeddings"):
        name = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name, name)
    return converted.tensors.get(name)


def _side_files(partial: PartialFolder, folder: Path, provenance: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Carry the source's other files back under their old names; returns those that are missing, and changed."""
    missing, changed = [], []
    for name, entry in provenance["files"].items():
        if name.endswith(".safetensors") or "from" not in entry:
            continue
        if not (folder / name).is_file():
            missing.append(entry["from"])
            continue
        partial.add(entry["from"], lambda target, name=name: copy(folder / name, target))
        if file_sha256(partial.path / entry["from"]) != entry["sha256"]:
            changed.append(entry["from"])
    return missing, changed
