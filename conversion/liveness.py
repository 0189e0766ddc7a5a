"""L3: the new parameters learn. At first only the documented ones have no gradient, after two steps all have one."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    length = min(length, model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, length), generator=generator)

    expected = documented(model.config, list(new))
    result: dict[str, Any] = {"new_tensors": len(new), "documented": expected["dormant"], "idle": expected["idle"]}
    if new:
        optimizer = torch.optim.AdamW(new.values(), lr=LEARNING_RATE, weight_decay=0.0)
        losses = []
        for step in range(3):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
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
