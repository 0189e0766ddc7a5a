"""L3: the new parameters learn. At first only the documented ones have no gradient, after two steps all have one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion.checkpoints import Checkpoint
from transformer2.conversion.layer_stream import LayerStream, Run
from transformer2.conversion.logits import load_converted
from transformer2.variants import AXES

LEARNING_RATE = 1e-3
ROUNDING = 1e-5


def check_liveness(output: Path, new_names: list[str], length: int = 48) -> dict[str, Any]:
    """Three backward passes of cross-entropy on random tokens in float32, with two AdamW steps of the new parameters.

    Returns the names without gradient at step 0, those that the variants document, and those without one at step 2.
    """
    model, _ = load_converted(output, torch.float32)
    new = {name: parameter for name, parameter in model.named_parameters() if name in set(new_names)}
    model.requires_grad_(False)
    for parameter in new.values():
        parameter.requires_grad_(True)
    ids = training_tokens(model.config, length)

    def backward() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.item()

    return follow(model.config, new, backward)


def check_liveness_by_layer(
    output: Checkpoint, config: Transformer2Config, new_names: list[str], length: int = 48
) -> dict[str, Any]:
    """As `check_liveness`, with the new parameters and one layer in memory at a time."""
    network = LayerStream(Transformer2ForCausalLM, config, output.tensors, torch.float32, set(new_names))
    ids = training_tokens(config, length)
    return follow(config, network.resident, lambda: _backward(network, ids))


def _backward(network: LayerStream, ids: Tensor) -> float:
    """Forward with the input of every layer kept, then backward layer by layer, each computed once more."""
    run = Run([{"input_ids": ids}], cached=False)
    (call,) = run.calls
    network.enter([run])
    entered, inputs = call.stream, []
    with torch.no_grad():
        for index in range(len(network)):
            inputs.append(call.stream)
            network.step(index, [run])
    last = call.stream = _leaves(call.stream)
    hidden = network.leave(run)
    with network.head() as head:
        loss = functional.cross_entropy(head(hidden)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
    gradients = [tensor.grad for tensor in last]
    for index in reversed(range(len(network))):
        call.stream = _leaves(inputs[index])
        with network.layer(index):
            _send_back(network.through(index, call), gradients)
        gradients = [tensor.grad for tensor in call.stream]
    _send_back(entered, gradients)
    return loss.item()


def _leaves(stream: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in stream)


def _send_back(outputs: tuple[Tensor, ...], gradients: list[Tensor | None]) -> None:
    pairs = zip(outputs, gradients, strict=True)
    pairs = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad and gradient is not None]
    if pairs:
        torch.autograd.backward(*(list(part) for part in zip(*pairs, strict=True)))


def training_tokens(config: Any, length: int) -> Tensor:
    """Two rows [2, T] of random token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (2, min(length, config.max_position_embeddings)), generator=generator)


def follow(config: Any, new: dict[str, nn.Parameter], backward: Callable[[], float]) -> dict[str, Any]:
    """Three calls of `backward`, which leaves gradients and returns the loss, and two optimiser steps between them."""
    expected = documented(config, list(new))
    result: dict[str, Any] = {"new_tensors": len(new), "documented": expected["dormant"], "idle": expected["idle"]}
    if new:
        optimizer = torch.optim.AdamW(new.values(), lr=LEARNING_RATE, weight_decay=0.0)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            losses.append(backward())
            if step == 0:
                result["dead_at_start"] = without_gradient(new, {*expected["dormant"], *expected["idle"]})
            if step < 2:
                optimizer.step()
        result["dead_after_two_steps"] = without_gradient(new, set(expected["idle"]))
        result["losses"] = losses
    else:
        result.update(dead_at_start=[], dead_after_two_steps=[], losses=[])
    result["as_documented"] = result["dead_at_start"] == sorted({*expected["dormant"], *expected["idle"]})
    result["all_alive"] = set(result["dead_after_two_steps"]) <= set(expected["idle"])
    return result


def without_gradient(parameters: dict[str, nn.Parameter], documented: set[str]) -> list[str]:
    """Names of those whose gradient is missing or exactly zero everywhere.

    Of those `documented` as such, also what is left of a gradient that only rounding keeps from being zero: at most
    `ROUNDING` times the largest gradient of all.
    """
    sizes = {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in parameters.items()}
    rounding = ROUNDING * max(sizes.values())
    return sorted(name for name, size in sizes.items() if not size > (rounding if name in documented else 0.0))


def documented(config: Any, names: list[str]) -> dict[str, list[str]]:
    """What the variants say about the new parameters `names`: dormant at the identity start, and idle for ever."""
    dormant: set[str] = set()
    idle: set[str] = set()
    for axis, menu in AXES.items():
        options = dict(getattr(config, axis))
        variant = menu[options.pop("type")]
        options.pop("layers", None)
        if options.get("form", "identity") == "identity":
            dormant.update(_matching(variant.dormant, names))
        idle.update(_matching(variant.idle(config, **options), names))
    return {"dormant": sorted(dormant - idle), "idle": sorted(idle)}


def _matching(patterns: tuple[str, ...], names: list[str]) -> list[str]:
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
