"""Which parameters are new, which are trained, and in which optimiser group each one is."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from transformer2.conversion.new_parameters import is_new
from transformer2.errors import UserError


def select(model: nn.Module, train: Literal["new", "all"], frozen: Sequence[str] = ()) -> None:
    """Let gradients reach the parameters that are to be trained, and no others.

    frozen: regular expressions of names that are not trained in any case. Raises UserError where that leaves none.
    """
    for pattern in frozen:
        if not any(re.search(pattern, name) for name, _ in model.named_parameters()):
            raise UserError(f"optimisation.frozen: no parameter has a name like {pattern!r}.")
    for name, parameter in model.named_parameters():
        kept = any(re.search(pattern, name) for pattern in frozen)
        parameter.requires_grad_((train == "all" or is_new(name)) and not kept)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "This model has no trainable parameter with optimisation.train=new, because it has no new residual and no "
            "local mixer: convert it first (`transformer2 convert`), or set optimisation.train=all."
        )


def decays(owner: nn.Module, name: str) -> bool:
    """Whether weight decay applies: to weights of linear layers and embeddings, gates excepted.

    Norms, biases, scalars (carry, erase) and mixing weights that start at one would be pulled away from their start,
    and a gate would be pulled back to it.
    """
    path = name.split(".")
    return isinstance(owner, nn.Linear | nn.Embedding) and path[-1] == "weight" and "gate" not in path


def parameter_groups(model: nn.Module, lr: dict[str, float], weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups over every trained parameter: {new, pretrained} x {decay, no decay}, empty ones left out.

    lr: learning rate by kind. Each group holds `params`, `lr`, `weight_decay`, and for reports `name`, `kind` and
    `count`.
    """
    owners = dict(model.named_modules())
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = "new" if is_new(name) else "pretrained"
        decay = weight_decay if decays(owners[name.rpartition(".")[0]], name) else 0.0
        label = f"{kind}, decayed" if decay else kind
        group = groups.setdefault(
            label, {"name": label, "kind": kind, "lr": lr[kind], "weight_decay": decay, "count": 0, "params": []}
        )
        group["params"].append(parameter)
        group["count"] += parameter.numel()
    return list(groups.values())


def count_parameters(model: nn.Module) -> dict[str, dict[str, int]]:
    """{"new": {"trained": n, "frozen": n}, "pretrained": {...}}, in numbers."""
    counts = {kind: {"trained": 0, "frozen": 0} for kind in ("new", "pretrained")}
    for name, parameter in model.named_parameters():
        kind = "new" if is_new(name) else "pretrained"
        counts[kind]["trained" if parameter.requires_grad else "frozen"] += parameter.numel()
    return counts


def table(model: nn.Module, groups: list[dict[str, Any]]) -> str:
    """The groups for people, one line each, frozen parameters last."""
    rows = [("parameters", "number", "learning rate", "weight decay")]
    rows += [(g["name"], f"{g['count']:,}", f"{g['lr']:g}", f"{g['weight_decay']:g}") for g in groups]
    frozen = sum(kind["frozen"] for kind in count_parameters(model).values())
    rows.append(("frozen", f"{frozen:,}", "-", "-"))
    return "\n".join(f"{a:<22}{b:>16}{c:>16}{d:>15}" for a, b, c, d in rows)
