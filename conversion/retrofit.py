"""Conversion: a Llama checkpoint becomes a Transformer2 checkpoint that computes the same, bit for bit.

The result is an overlay. The base shards are the source's, byte for byte; one added shard holds the new parameters; an
index, a config and the model's code go with them. So memory does not grow with the base model, except for verifying.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

import transformer2
from transformer2.conversion.checkpoints import INDEX_NAME, PROVENANCE, open_checkpoint, read_json
from transformer2.conversion.files import (
    WAYS,
    choose_method,
    copy,
    place,
    protect,
    require_space,
    write_json,
)
from transformer2.conversion.index import build_index
from transformer2.conversion.llama_sources import LlamaSource, check_llama
from transformer2.conversion.new_parameters import initialise, new_tensors
from transformer2.conversion.paths import check_seed, plain_os_errors, user_path
from transformer2.conversion.provenance import command, origin_of, original, write_readme
from transformer2.conversion.publishing import PartialFolder, partial_folder, publish, require_free_name
from transformer2.conversion.results import Conversion
from transformer2.conversion.rewriting import bytes_of, cast_source, cut_into_shards, known_dtype, parse_size
from transformer2.conversion.shards import STORED, Piece, aligned, to_bytes, write_shard
from transformer2.conversion.side_files import side_files
from transformer2.conversion.sources import Source, resolve_source
from transformer2.conversion.target_config import (
    build_config,
    config_json,
    departs_from_identity,
    refuse_unknown_names,
)
from transformer2.conversion.verification import known_level, run_checks
from transformer2.errors import CheckFailed, UserError

NOTHING_CHOSEN = (
    "Note: neither a residual nor a local mixer was chosen, so this keeps the source's, without new parameters; "
    "`transformer2 variants` lists what there is."
)


@plain_os_errors()
def convert(
    source: str | Path,
    output: str | Path,
    *,
    residual: str | dict[str, Any] | None = None,
    local_mixer: str | dict[str, Any] | None = None,
    verify: str = "L3",
    materialize: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    revision: str | None = None,
    seed: int = 0,
    assume_tied: bool = False,
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Conversion:
    """Convert the model at `source` (folder, Hub name or .gguf file) into the new folder `output`; returns a report.

    The source is a Llama, a relative (`conversion/families.py`), or a Transformer2 that gets a variant on an axis
    where it has none. `residual` and `local_mixer` are as in `Transformer2Config`, except that `form` defaults to
    "identity", and that None keeps what the source has: `standard` and `none` in a Llama. `verify` is
    the proof required before `output` appears: L0 structure, L1 bytes, L2 logits, L3 gradients, L4 quality.
    `materialize` is how the source's shards get there: "link", "reflink", "copy", or "auto" (a clone where the file
    system can, else a copy). `dtype` ("float32", "bfloat16", "float16") casts the weights and `max_shard_size` ("5GB")
    cuts them into other files; either way they are written anew, tensor by tensor. `seed` makes the new parameters
    reproducible. `progress` is told what is being done.

    Raises UserError for bad input, CheckFailed if verification fails, MachineError for lack of disk; then there is no
    output.
    """
    verify = known_level(verify)
    check_seed(seed)
    if materialize not in WAYS:
        raise UserError(f"Unknown way to materialise {materialize!r}; choose one of: {', '.join(WAYS)}.")
    target_dtype, shard_bytes = known_dtype(dtype), parse_size(max_shard_size)
    if materialize not in ("auto", "copy") and (target_dtype or shard_bytes):
        raise UserError(
            f"materialize={materialize!r} shares the source's files, which dtype and max_shard_size change: leave "
            "either out."
        )
    refuse_unknown_names("residual", residual)
    refuse_unknown_names("local_mixer", local_mixer)
    say = progress or (lambda message: None)
    output = Path(os.path.abspath(user_path(output)))
    with plain_os_errors(output.parent):
        require_free_name(output, overwrite)
        say("Reading the source")
        origin = resolve_source(source, output, revision)
        _require_apart(origin.folder, output)
        llama = cast_source(check_llama(open_checkpoint(origin.folder), assume_tied), target_dtype)
        config = build_config(llama, residual, local_mixer)
        config.converted_from = origin_of(origin)
        if (departure := departs_from_identity(config, llama)) and verify not in ("L0", "L1"):
            raise UserError(
                f"{departure} does not start as the source model, so its logits cannot be equal: leave the form at "
                "'identity', or use verify='L1' (--verify L1 on the command line) to convert "
                "all the same."
            )
        plan = {
            "residual": config.residual,
            "local_mixer": config.local_mixer,
            "seed": seed,
            "assume_tied": assume_tied,
            "materialize": materialize,
            "dtype": str(target_dtype).removeprefix("torch.") if target_dtype else None,
            "max_shard_bytes": shard_bytes,
        }
        fingerprint = {"plan": plan, "tool": transformer2.__version__, "source": _signature(llama)}
        if residual is None and local_mixer is None:
            say(NOTHING_CHOSEN)
        with partial_folder(output, fingerprint, overwrite=overwrite, resume=resume) as partial:
            report = _build(partial, origin, llama, config, plan, say)
            say(f"Verifying ({verify})")
            result = run_checks(origin.folder, partial.path, verify, progress=say)
            if not result["passed"]:
                failed = CheckFailed(f"Verification failed, so nothing was written: {result['failures'][0]}")
                failed.report = result  # for whoever wants to show it
                raise failed
            if report["materialized"] == "link":
                for file in partial.path.glob("*.safetensors"):
                    if file.stat().st_nlink > 1:
                        protect(file)
            say("Publishing")
            publish(partial, output)
    report["output"] = str(output)
    report["verification"] = result
    return report


def _build(
    partial: PartialFolder,
    origin: Source,
    llama: LlamaSource,
    config: Any,
    plan: dict[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write every file but verification.json; returns the report of what was written."""
    shards, described = llama.checkpoint.shards, new_tensors(config, llama)
    rewritten = cut_into_shards(llama, plan["max_shard_bytes"]) if llama.cast or plan["max_shard_bytes"] else None
    method = "rewrite" if rewritten else choose_method(plan["materialize"], shards[0].resolve(), partial.path)
    new_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in described.values())
    base_bytes = {"copy": llama.checkpoint.num_bytes, "rewrite": bytes_of(llama)}.get(method, 0)
    done = sum(entry["size"] for entry in partial.finished.values())
    needed = max(0, base_bytes + new_bytes - done) + 64 * 2**20  # and some for tokenizer and index
    require_space(partial.path.parent, needed, can_link=method == "copy")

    warnings = list(llama.notes)
    if departure := departs_from_identity(config, llama):
        warnings.append(f"{departure} does not start as the source model: the output computes something else.")
    if method == "link":
        warnings.append(
            "The base shards are hard links: editing them in place would alter the source as well, so both are "
            "read-only now."
        )
    if llama.cast:
        warnings.append(f"The weights were cast to {plan['dtype']}; the proof is against the source cast likewise.")
    total = len(rewritten or shards) + bool(described)
    names = [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    files: dict[str, dict[str, Any]] = {}
    for pieces, name in zip(rewritten or (), names, strict=False):
        say(f"{name}: writing {len(pieces)} tensors")
        files[name] = partial.add(name, lambda target, pieces=pieces: write_shard(target, pieces))
    for shard, name in zip(() if rewritten else shards, names, strict=False):
        say(f"{name}: {method} of {shard.name}")
        entry = partial.add(name, lambda target, shard=shard: place(shard, target, method), hashed=method != "link")
        files[name] = {**entry, "from": shard.name}
    if described:
        say(f"{names[-1]}: {len(described)} new tensors")
        files[names[-1]] = partial.add(names[-1], lambda target: _write_new(target, config, llama, plan["seed"]))

    index = build_index([partial.path / name for name in names], config.tie_word_embeddings)
    files[INDEX_NAME] = partial.add(INDEX_NAME, lambda target: write_json(target, index))
    files["config.json"] = partial.add("config.json", lambda target: write_json(target, config_json(config)))
    for file in travelling_code():
        files[file.name] = partial.add(file.name, lambda target, file=file: copy(file, target))
    for name, file in side_files(origin.folder, taken=set(files)).items():
        files[name] = partial.add(name, lambda target, file=file: copy(file, target))
        files[name]["from"] = file.relative_to(origin.folder).as_posix()
    partial.add(
        "README.md", lambda target: write_readme(target, origin.folder, origin, plan)
    )  # to be edited: not listed

    provenance = {
        "tool": "transformer2",
        "tool_version": transformer2.__version__,
        "source": {"name": origin.name, "commit": origin.commit, "gguf": origin.gguf},
        "command": command(origin, plan),
        "options": plan,
        "base_dtype": str(llama.dtype).removeprefix("torch."),
        "new_tensors": sorted(described),
        "notes": warnings,
        "files": files,
        "original": original(llama, hashed=method == "rewrite"),
    }
    write_json(partial.path / PROVENANCE, provenance)
    return {
        "source": provenance["source"],
        "residual": config.residual,
        "local_mixer": config.local_mixer,
        "materialized": method,
        "base_parameters": index["metadata"]["total_parameters"] - sum(math.prod(s) for s, _ in described.values()),
        "new_parameters": sum(math.prod(shape) for shape, _ in described.values()),
        "new_tensors": len(described),
        "new_bytes": new_bytes,
        "tie_word_embeddings": config.tie_word_embeddings,
        "files": sorted(files),
        "resumed_files": partial.reused,
        "warnings": warnings,
        **({"dequantised": origin.gguf["folder"]} if origin.gguf else {}),
    }


def _write_new(target: Path, config: Any, llama: LlamaSource, seed: int) -> str:
    tensors = initialise(config, llama, seed)
    pieces = [
        Piece(name, STORED[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), _bytes_of(tensor))
        for name, tensor in tensors.items()
    ]
    return write_shard(target, aligned(pieces))


def _bytes_of(tensor: Any) -> Iterator[bytes]:
    yield to_bytes(tensor)  # when it is written, not before


def travelling_code() -> list[Path]:
    """The model files that a checkpoint carries: both entry files and all that they import, flat."""
    package = Path(transformer2.__file__).parent
    files: set[Path] = set()
    for entry in ("modeling_transformer2.py", "configuration_transformer2.py"):
        files.add(package / entry)
        files.update(Path(file) for file in get_relative_import_files(package / entry))
    return sorted(files)


def _signature(llama: LlamaSource) -> list[Any]:
    """What tells one source from another without reading its weights."""
    stats = [(shard.name, shard.stat().st_size, shard.stat().st_mtime_ns) for shard in llama.checkpoint.shards]
    return [*map(list, stats), read_json(llama.checkpoint.folder / "config.json")]


def _require_apart(source: Path, output: Path) -> None:
    source, output = source.resolve(), output.resolve()
    if source == output or source in output.parents or output in source.parents:
        raise UserError(f"The output {output} and the source {source} overlap; choose a folder elsewhere.")
