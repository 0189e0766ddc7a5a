"""L2 to L4, the checks that run the two networks: whole if they fit into memory, layer by layer if they do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import Checkpoint
from transformer2.conversion.layer_logits import check_logits_by_layer
from transformer2.conversion.liveness import check_liveness, check_liveness_by_layer
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.logits import check_fresh_process, check_logits
from transformer2.conversion.probes import rounding_allowed, within
from transformer2.conversion.quality import check_quality, check_quality_by_layer
from transformer2.conversion.structure import summary

Record = Callable[..., None]
LEFT_OUT = "The networks were compared layer by layer, never whole in memory, so {} left out."


def exceeds_memory(source: LlamaSource) -> bool:
    """Whether a float32 copy of the source, with a fifth more for everything else, is more than is free here."""
    needed = 1.2 * 4 * sum(entry.num_elements for entry in source.checkpoint.tensors.values())
    return (free := _free_memory()) is not None and needed > free


def _free_memory() -> int | None:
    """Bytes that a process can still have, if the system says so."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def run_networks(
    source: LlamaSource,
    converted: Checkpoint,
    wanted: int,
    record: Record,
    *,
    stream_layers: bool,
    fresh_process: bool,
    text: Path | None,
    say: Callable[[str], None],
) -> list[str]:
    """Record the checks of L2, L3 and L4, as far as `wanted`; returns what to tell the user about what is left out."""
    config = Transformer2Config.from_pretrained(converted.folder)
    _logits(source, converted, config, record, stream_layers, fresh_process, say)
    if wanted >= 3:
        say("Following gradients")
        _liveness(source, converted, config, record, stream_layers)
    if wanted >= 4:
        say("Scoring a text")
        _quality(source, converted, config, record, stream_layers, text, say)
    if not stream_layers:
        return []
    missing = ["the process without the package"] if fresh_process else []
    missing += ["continuations of prompts"] if wanted >= 4 else []
    return [LEFT_OUT.format(" and ".join(missing) + (" were" if len(missing) > 1 else " was"))] if missing else []


def _logits(
    source: LlamaSource,
    converted: Checkpoint,
    config: Transformer2Config,
    record: Record,
    stream_layers: bool,
    fresh_process: bool,
    say: Callable[[str], None],
) -> None:
    for dtype in dict.fromkeys((torch.float32, source.dtype)):
        allowed = rounding_allowed(config, dtype)
        name = str(dtype).removeprefix("torch.")
        say(f"Comparing logits in {name}")
        if stream_layers:
            results = check_logits_by_layer(source, converted, config, dtype, allowed, say)
        else:
            results = check_logits(source, converted.folder, dtype)
        for probe, figures in results.items():
            if probe == "loading":
                record("L2", f"{name} loading", figures["bit_equal"], "; ".join(figures["problems"]) or "ok")
            else:
                detail = describe(figures, allowed)
                record("L2", f"{name} {probe}", within(figures, allowed), detail, allowed=allowed, **figures)
    if fresh_process and not stream_layers:
        say("Loading in a process with transformers alone")
        result = check_fresh_process(source, converted.folder, rounding_allowed(config, torch.float32))
        record("L2", "without the package", result["bit_equal"], "; ".join(result["problems"]) or "same logits")


def describe(figures: dict[str, Any], allowed: float) -> str:
    """The figures of one probe in words."""
    if figures["bit_equal"]:
        return f"bit-equal on {figures['tokens']} tokens"
    if within(figures, allowed):
        share = figures["max_abs_diff"] / figures["largest_logit"]
        return f"equal up to rounding: {share:.1e} of the largest logit, {allowed:.0e} allowed"
    if figures.get("of") == "states":
        return f"states differ by up to {figures['max_abs_diff']:.3g} after {figures['first_difference']}"
    return (
        f"logits differ by up to {figures['max_abs_diff']:.3g} (KL {figures['max_kl']:.3g}, top-1 agreement "
        f"{figures['top1_agreement']:.1%}), first in {figures['first_difference']}"
    )


def _liveness(
    source: LlamaSource, converted: Checkpoint, config: Transformer2Config, record: Record, stream_layers: bool
) -> None:
    new = [name for name in converted.tensors if name not in source.checkpoint.tensors]
    if stream_layers:
        result = check_liveness_by_layer(converted, config, new)
    else:
        result = check_liveness(converted.folder, new)
    documented = sorted({*result["documented"], *result["idle"]})
    wrong = sorted(set(result["dead_at_start"]) ^ set(documented))
    total = f"{result['new_tensors']} new tensors"
    if documented:
        detail = f"{len(documented)} of {total} have no gradient yet, as documented: what they feed starts at zero"
    else:
        detail = f"each of {total} has a gradient"
    record("L3", "step 0", not wrong, f"not as documented: {summary(wrong)}" if wrong else detail, **result)
    wrong = sorted(set(result["dead_after_two_steps"]) - set(result["idle"]))
    unused = f", but {len(result['idle'])} that this variant never uses" if result["idle"] else ""
    detail = f"each of {total} has a gradient{unused}"
    record("L3", "step 2", not wrong, f"without gradient: {summary(wrong)}" if wrong else detail)


def _quality(
    source: LlamaSource,
    converted: Checkpoint,
    config: Transformer2Config,
    record: Record,
    stream_layers: bool,
    text: Path | None,
    say: Callable[[str], None],
) -> None:
    """In the stored type; for variants that are exact up to rounding only, in float32."""
    dtype = source.dtype if rounding_allowed(config, source.dtype) == 0.0 else torch.float32
    allowed = rounding_allowed(config, dtype)
    if stream_layers:
        figures = check_quality_by_layer(source, converted, config, dtype, text, say)
    else:
        figures = check_quality(source, converted.folder, dtype, text)
    passed = figures["difference"] <= allowed * abs(figures["base_nll"])
    words = f"{figures['nll']:.4f} nats per token on {figures['text']} ({figures['tokens']} tokens)"
    detail = f"{words}, as the source" if passed else f"{words}, {figures['base_nll']:.4f} in the source"
    record("L4", "perplexity", passed, detail, **figures)
    if "prompts" in figures:
        same, prompts = figures["same_continuations"], figures["prompts"]
        record("L4", "continuations", same == prompts, f"{same} of {prompts} prompts continued with the same tokens")
