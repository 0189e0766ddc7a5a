"""L0 and L1 for what `train` made of a conversion: what has to be as in the source, and what may have moved."""

from pathlib import Path
from typing import Any

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import Checkpoint, TensorEntry, read_json
from transformer2.conversion.llama_sources import EMBEDDING, HEAD, LlamaSource, some
from transformer2.conversion.structure import config_differences, new_tensor_faults, tensor_fault
from transformer2.conversion.target_config import build_config, config_json

REPORT = "training_report.json"
LEFT_OUT = "its logits and gradients are expected to differ from the source's, so L2 and L3 are left out"


def training_report(folder: Path) -> dict[str, Any] | None:
    """What `train` wrote into a folder, or None if the folder is a conversion. Conversions never carry this file."""
    return read_json(folder / REPORT) if (folder / REPORT).is_file() else None


def trained_everything(report: dict[str, Any]) -> bool:
    """Whether this run, or one before it, trained the pretrained parameters as well."""
    return report.get("pretrained_changed") is True


def check_trained_structure(
    source: LlamaSource, output: Checkpoint, config: Transformer2Config
) -> dict[str, list[str]]:
    """L0: check name -> what is wrong. transformers saved it: tied tensors once, defaults not at all."""
    base = [tensor_fault(name, entry, _counterpart(name, source, output)) for name, entry in _pretrained(source)]
    tied = {EMBEDDING, HEAD} if source.config.tie_word_embeddings else set()
    derived = config_json(build_config(source, config.residual, config.local_mixer))
    fields = set(config_differences(config_json(config), derived)) - {"use_cache"}  # which training switches on
    return {
        "base tensors": [fault for fault in base if fault],
        "new tensors": new_tensor_faults(source, output, config, set(source.checkpoint.tensors) | tied),
        "config": [f"{some(sorted(fields))} does not follow from the source's config"] if fields else [],
    }


def changed_tensors(source: LlamaSource, output: Checkpoint) -> list[str]:
    """The pretrained tensors whose bytes are no longer the source's."""
    pairs = [(name, entry, _counterpart(name, source, output)) for name, entry in _pretrained(source)]
    return [name for name, entry, found in pairs if found is not None and found.sha256() != entry.sha256()]


def note(source: LlamaSource, report: dict[str, Any], changed: list[str] | None) -> str:
    """One sentence for the user about what was and was not compared. changed: None where bytes were not compared."""
    if not trained_everything(report):
        return f"This folder was trained, its new parameters only: {LEFT_OUT}."
    total = len(_pretrained(source))
    moved = f", {len(changed)} of {total} pretrained tensors differ ({some(changed)})" if changed else ""
    return f"This folder was trained, all its parameters{moved}: {LEFT_OUT}."


def _pretrained(source: LlamaSource) -> list[tuple[str, TensorEntry]]:
    """The tensors that the model loads: not the rotary frequencies of old checkpoints."""
    return [(n, entry) for n, entry in source.checkpoint.tensors.items() if not n.endswith(".rotary_emb.inv_freq")]


def _counterpart(name: str, source: LlamaSource, output: Checkpoint) -> TensorEntry | None:
    found = output.tensors.get(name)
    if found is None and source.config.tie_word_embeddings:
        found = output.tensors.get({EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name, name))
    return found
