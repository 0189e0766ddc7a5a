"""L2 for models larger than memory: source and converted model side by side, one layer of each at a time.

Both get the same tokens. If the states are equal before a layer, the layer gets the same input in both; if they are
equal after it, so are the inputs of the next one. So equality of every layer and of the head proves the equality of
the networks, and the first inequality is where the fault is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion.checkpoints import Checkpoint
from transformer2.conversion.families import FAMILIES, class_named
from transformer2.conversion.layer_stream import LayerStream, Run
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.probes import compare, probe_chunks, probe_inputs

NEW_ONES = "the layer's pretrained tensors are equal, so new ones are the cause"
TOKENS_AT_ONCE = 64  # whose logits over the whole vocabulary are in memory together


@torch.no_grad()
def check_logits_by_layer(
    source: LlamaSource,
    output: Checkpoint,
    config: Transformer2Config,
    dtype: torch.dtype,
    allowed: float = 0.0,
    say: Callable[[str], None] = lambda message: None,
    probes: dict[str, dict[str, Tensor]] | None = None,
    on_logits: Callable[[str, Tensor, Tensor], None] = lambda probe, old, new: None,
) -> dict[str, dict[str, Any]]:
    """Probe name -> figures, as `check_logits` has them, with "first_difference" naming layer and tensor.

    allowed: how far states and logits may be apart, as a share of the largest. Where nothing may differ, it ends at
    the first layer that does, and the figures are those of that layer's output. on_logits sees the logits [N, V] of
    both networks, some tokens at a time.
    """
    probes = probe_inputs(source.config) if probes is None else probes
    base_class = class_named(FAMILIES[source.config.model_type].model)
    base = LayerStream(base_class, source.config, source.checkpoint.tensors, dtype)
    new = LayerStream(Transformer2ForCausalLM, config, output.tensors, dtype)
    runs = {
        name: [Run(probe_chunks(name, inputs), name == "cached") for _ in range(2)] for name, inputs in probes.items()
    }
    for side, network in enumerate((base, new)):
        network.enter([pair[side] for pair in runs.values()])
    place = _part(runs, probes, allowed)
    if place is not None:
        return _stopped(place, "the embeddings" + _tensor("model.embed_tokens.", source, output), probes)

    first = None
    for index in range(len(base)):
        say(f"Layer {index + 1} of {len(base)}")
        before = {name: [[call.stream for call in run.calls] for run in pair] for name, pair in runs.items()}
        for side, network in enumerate((base, new)):
            network.step(index, [pair[side] for pair in runs.values()])
        place = _part(runs, probes, allowed)
        if place is not None and first is None:
            name = place["probe"]
            first = f"layer {index}" + (
                _tensor(f"model.layers.{index}.", source, output)
                or _module(base, new, index, runs[name], before[name])
            )
            if allowed == 0.0:
                return _stopped(place, first, probes)
    first = first or "the head" + _tensor("lm_head.", source, output)
    results = _logits(base, new, runs, probes, on_logits)
    return {name: {**r, **({} if r["bit_equal"] else {"first_difference": first})} for name, r in results.items()}


def _logits(
    base: LayerStream,
    new: LayerStream,
    runs: dict[str, list[Run]],
    probes: dict[str, dict[str, Tensor]],
    on_logits: Callable[[str, Tensor, Tensor], None],
) -> dict[str, dict[str, Any]]:
    """The figures of every probe, from the states that reach the two heads."""
    results = {}
    with base.head() as base_head, new.head() as new_head:
        for name, pair in runs.items():
            hidden = []
            for network, run in zip((base, new), pair, strict=True):
                states, mask = network.leave(run), probes[name].get("attention_mask")
                hidden.append(states.flatten(0, 1) if mask is None else states[mask.bool()])
            figures = []
            for old, now in zip(*(states.split(TOKENS_AT_ONCE) for states in hidden), strict=True):
                old, now = base_head(old), new_head(now)
                figures.append(compare(old, now))
                on_logits(name, old, now)
            results[name] = _together(figures)
    return results


def _together(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of parts of a probe as those of the whole."""
    tokens = sum(part["tokens"] for part in parts)
    return {
        "bit_equal": all(part["bit_equal"] for part in parts),
        "tokens": tokens,
        **{key: max(part.get(key, 0.0) for part in parts) for key in ("max_abs_diff", "largest_logit", "max_kl")},
        "top1_agreement": sum(part["top1_agreement"] * part["tokens"] for part in parts) / tokens,
    }


def _part(runs: dict[str, list[Run]], probes: dict[str, dict[str, Tensor]], allowed: float) -> dict[str, Any] | None:
    """The probe on whose real tokens the states of the two networks part the most, if they do."""
    places = []
    for name, (old, new) in runs.items():
        mask = probes[name].get("attention_mask")
        for calls in zip(old.calls, new.calls, strict=True):
            states = [call.stream[0] if mask is None else call.stream[0][mask.bool()] for call in calls]
            if torch.equal(*states):
                continue
            difference = (states[0].double() - states[1].double()).abs().max().item()
            largest = states[0].abs().max().item()
            if not difference <= allowed * largest:  # NaN is no agreement
                places.append({"probe": name, "max_abs_diff": difference, "largest_logit": largest})
    return max(places, key=lambda place: place["max_abs_diff"], default=None)


def _tensor(prefix: str, source: LlamaSource, output: Checkpoint) -> str:
    """The first pretrained tensor below `prefix` whose bytes differ, in words."""
    for name, entry in source.checkpoint.tensors.items():
        if name.startswith(prefix) and name in output.tensors and output.tensors[name].sha256() != entry.sha256():
            return f", whose tensor {name} has other values than in the source"
    return ""


def _module(base: LayerStream, new: LayerStream, index: int, pair: list[Run], before: list[list[Any]]) -> str:
    """Which module of a layer is the first with another output: its tensors are equal, so new ones are the cause."""
    if pair[0].cached:
        return ", with a cache"
    outputs = []
    for network, run, streams in zip((base, new), pair, before, strict=True):
        seen: dict[str, Tensor] = {}

        def record(module, inputs, result, *, name, seen=seen):
            seen.setdefault(name, result[0] if isinstance(result, tuple) else result)

        with network.layer(index) as layer:
            hooks = [
                module.register_forward_hook(lambda m, i, o, name=name, record=record: record(m, i, o, name=name))
                for name, module in layer.named_modules()
                if name
            ]
            call = run.calls[0]
            after, call.stream = call.stream, streams[0]
            network.through(index, call)
            call.stream = after
            for hook in hooks:
                hook.remove()
        outputs.append(seen)
    old, now = outputs
    for name, value in old.items():
        if name in now and not (value.shape == now[name].shape and torch.equal(value, now[name])):
            return f", first in the output of {name}: {NEW_ONES}"
    return f", in what follows its MLP: {NEW_ONES}"


def _stopped(place: dict[str, Any], where: str, probes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    figures = {"bit_equal": False, "first_difference": where, **place}
    tokens = probes[place["probe"]]["input_ids"].numel()
    return {place["probe"]: {**figures, "tokens": tokens, "of": "states"}}
