"""The proof that a converted checkpoint is what it claims to be, at five levels; each includes those before it.

L0 structure    tensors, index, config and files are those that source and options imply
L1 bytes        the source's tensors and files are untouched
L2 logits       bit-equal to stock Llama, in float32 and the stored type, also where only transformers is installed
L3 gradients    every new parameter learns
L4 quality      equal perplexity on a text, and the same continuations of prompts

L2 to L4 run both networks, whole or (for models larger than memory) layer by layer.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import transformer2
from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import PROVENANCE, Checkpoint, open_checkpoint, read_json
from transformer2.conversion.computed import exceeds_memory, run_networks
from transformer2.conversion.files import write_json
from transformer2.conversion.llama_sources import LlamaSource, check_llama
from transformer2.conversion.paths import FORBIDDEN, plain_os_errors, user_path
from transformer2.conversion.results import Verification
from transformer2.conversion.rewriting import cast_source, known_dtype
from transformer2.conversion.shards import read_header_text
from transformer2.conversion.sources import resolve_source
from transformer2.conversion.structure import changed_files, check_bytes, check_structure, fill_hashes, summary
from transformer2.conversion.trained import (
    changed_tensors,
    check_trained_structure,
    note,
    trained_everything,
    training_report,
)
from transformer2.errors import UserError

RESULT = "verification.json"
LEVELS = ("L0", "L1", "L2", "L3", "L4")


def known_level(level: str) -> str:
    """The level as it is spelt here. Raises UserError, with the list, for an unknown one."""
    if str(level).upper() not in LEVELS:
        raise UserError(f"Unknown verification level {level!r}; choose one of: {', '.join(LEVELS)}.")
    return level.upper()


@plain_os_errors()
def verify(
    source: str | Path,
    output: str | Path,
    level: str = "L3",
    *,
    revision: str | None = None,
    fresh_process: bool = True,
    stream_layers: bool | None = None,
    text: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Check the converted folder `output` against its source (a folder or Hub name) up to `level`.

    Returns the result, whose "passed" says whether everything held; it is written to `verification.json` in `output`
    as well. A folder that `train` wrote is compared as far as training leaves things in place (L0 and L1), and "notes"
    says so. `fresh_process=False` leaves out the part of L2 that starts a process without the package.
    `stream_layers=True` has one layer of each network in memory at a time; None does so if they do not fit otherwise.
    `text` is a file to score at L4. Raises UserError if one of the two cannot be read at all.
    """
    level = known_level(level)
    output = user_path(output)
    if text is not None:
        if level != "L4":
            raise UserError("A text is scored at L4 only: ask for that level, or leave the text out.")
        if not (text := user_path(text)).is_file():
            raise UserError(f"There is no file {text}: name the text to score.")
    if not output.is_dir():
        raise UserError(f"There is no folder {output}.")
    if str(source).endswith(".gguf"):
        raise UserError(
            f"Give the dequantised folder that the conversion reported, not {Path(source).name}: that is the source."
        )
    folder = resolve_source(source, output, revision).folder
    with plain_os_errors(output):
        return run_checks(
            folder,
            output,
            level,
            fresh_process=fresh_process,
            stream_layers=stream_layers,
            text=text,
            progress=progress,
        )


def run_checks(
    source_folder: Path,
    output: Path,
    level: str,
    *,
    fresh_process: bool = True,
    stream_layers: bool | None = None,
    text: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """As `verify`, with the source's folder found already."""
    say = progress or (lambda message: None)
    started = time.perf_counter()
    checks: list[dict[str, Any]] = []
    notes: list[str] = []

    def record(check_level: str, name: str, passed: bool, detail: str, **figures: Any) -> None:
        entry = {"level": check_level, "name": name, "passed": bool(passed), "detail": detail}
        checks.append({**entry, **({"figures": figures} if figures else {})})

    config = read_json(output / "config.json")
    if config.get("model_type") != "transformer2":
        raise UserError(f"{output} is no Transformer2 checkpoint: its config.json says {config.get('model_type')!r}.")
    source = check_llama(open_checkpoint(source_folder), assume_tied=bool(config.get("tie_word_embeddings")))
    source = cast_source(source, _cast_to(output))
    converted = _open(output, record)
    if converted is not None:
        wanted = LEVELS.index(level)
        loaded = _load_config(output, record)
        if (report := training_report(output)) is not None:
            level, notes = _trained(source, converted, loaded, report, wanted, record, say)
        else:
            for name, wrong in ({} if loaded is None else check_structure(source, converted, loaded)).items():
                record("L0", name, not wrong, summary(wrong))
            sound = all(
                check["passed"] for check in checks if check["name"] in ("base tensors", "new tensors", "config")
            )
            if wanted >= 1:
                say("Comparing bytes")
                compared, hashes = check_bytes(source, converted)
                for name, wrong in compared.items():
                    record("L1", name, not wrong, summary(wrong))
                if not compared["tensor bytes"]:
                    with contextlib.suppress(UserError, PermissionError):  # a broken or a read-only folder
                        fill_hashes(converted, hashes)
            if wanted >= 2 and sound:
                if stream_layers is None and (stream_layers := exceeds_memory(source)):
                    say("The networks do not fit into memory whole, so they are compared layer by layer")
                options = {"stream_layers": bool(stream_layers), "fresh_process": fresh_process, "text": text}
                notes = run_networks(source, converted, wanted, record, **options, say=say)
    failures = [f"{check['level']} {check['name']}: {check['detail']}" for check in checks if not check["passed"]]
    result: Verification = {
        "level": level,
        "passed": not failures,
        "failures": failures,
        "notes": notes,
        "checks": checks,
        "seconds": round(time.perf_counter() - started, 2),
        "versions": {
            "transformer2": transformer2.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if kept := _keeps_its_proof(source, output, result):
        notes.append(kept)
        return result
    try:
        write_json(output / RESULT, result)
    except OSError as error:
        if error.errno not in FORBIDDEN:
            raise
        notes.append(f"{RESULT} could not be written, because the folder may not be changed.")
    return result


def _keeps_its_proof(source: LlamaSource, output: Path, result: Verification) -> str | None:
    """Why `verification.json` stays as it is, if it does: a mistaken or a weaker check must not replace a proof."""
    try:
        proof, record = read_json(output / RESULT), read_json(output / PROVENANCE)
        headers = record["original"]["headers"]
        other = {shard.name: read_header_text(shard) for shard in source.checkpoint.shards} != headers
        stronger = proof["passed"] and LEVELS.index(proof["level"]) > LEVELS.index(result["level"])
    except (UserError, KeyError, TypeError, ValueError):
        return None
    if other and not result["passed"]:
        return f"This is not the source that the conversion recorded, so {RESULT} was left alone."
    return f"{RESULT} keeps the proof of {proof['level']}." if stronger and result["passed"] else None


def _trained(
    source: LlamaSource,
    output: Checkpoint,
    loaded: Transformer2Config | None,
    report: dict[str, Any],
    wanted: int,
    record: Callable[..., None],
    say: Callable[[str], None],
) -> tuple[str, list[str]]:
    """The checks of a folder that `train` wrote; returns the level that they reach and what to tell the user."""
    for name, wrong in ({} if loaded is None else check_trained_structure(source, output, loaded)).items():
        record("L0", name, not wrong, summary(wrong))
    changed = None
    if wanted >= 1:
        say("Comparing bytes")
        changed, files = changed_tensors(source, output), changed_files(source, output)
        if not trained_everything(report):
            faults = [f"{name} has other bytes than in the source" for name in changed]
            record("L1", "tensor bytes", not faults, summary(faults))
        record("L1", "carried files", not files, summary(files))
    return LEVELS[min(wanted, 1)], [note(source, report, changed)]


def _open(output: Path, record: Callable[..., None]) -> Checkpoint | None:
    try:
        return open_checkpoint(output)
    except UserError as error:
        record("L0", "shards", False, str(error).replace(f"{output}/", ""))
        return None


def _cast_to(output: Path) -> torch.dtype | None:
    """The type that the conversion was asked to cast the weights to."""
    with contextlib.suppress(UserError):  # a missing record is found at L0
        return known_dtype((read_json(output / PROVENANCE).get("options") or {}).get("dtype"))
    return None


def _load_config(output: Path, record: Callable[..., None]) -> Transformer2Config | None:
    try:
        return Transformer2Config.from_pretrained(output)
    except Exception as error:  # an edited file may hold anything
        record("L0", "config", False, f"config.json does not load: {' '.join(str(error).split())}")
        return None
