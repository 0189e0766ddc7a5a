"""Which parameters are new, which are trained, and in which optimiser group each one is."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn

from transformer2.conversion.new_parameters import is_new
from transformer2.errors import UserError
from transformer2.training.schema import ParameterGroup

# What wrappers put into names: DDP, torch.compile, and PEFT for adapted layers and for modules trained as a whole.
WRAPPERS = ("module", "_orig_mod", "base_layer", "modules_to_save.default")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under the names that they have in the plain model, adapters under their own.

    What PEFT keeps of a module that it has copied in order to train it is left out.
    """
    for name, parameter in model.named_parameters():
        if "original_module" not in name.split("."):
            yield canonical(name), parameter


def canonical(name: str) -> str:
    """The name of a parameter without what wrappers have put into it."""
    for wrapper in WRAPPERS:
        name = f".{name}".replace(f".{wrapper}.", ".").removeprefix(".")
    return name


def kind_of(name: str) -> Literal["new", "lora", "pretrained"]:
    """Of a residual or local mixer, of an adapter, or of the pretrained model."""
    if is_new(name):
        return "new"
    return "lora" if ".lora_" in name else "pretrained"


def select(model: nn.Module, train: Literal["new", "lora", "all"], frozen: Sequence[str] = ()) -> None:
    """Let gradients reach the parameters that are to be trained, and no others.

    frozen: regular expressions of names that are not trained in any case. Raises UserError where that leaves none.
    """
    parameters = dict(named_parameters(model))
    for pattern in frozen:
        if not any(re.search(pattern, name) for name in parameters):
            raise UserError(f"optimisation.frozen: no parameter has a name like {pattern!r}.")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    wanted = {"new": ("new",), "lora": ("new", "lora"), "all": ("new", "pretrained")}[train]
    for name, parameter in parameters.items():
        kept = any(re.search(pattern, name) for pattern in frozen)
        parameter.requires_grad_(kind_of(name) in wanted and not kept)
    if any(parameter.requires_grad for parameter in model.parameters()):
        return
    if frozen and any(kind_of(name) in wanted for name in parameters):
        raise UserError("Nothing is left to train: optimisation.frozen matches every parameter that would be.")
    raise UserError(
        "This model has no trainable parameter with optimisation.train=new, because it has no new residual and no "
        "local mixer: convert it first (`transformer2 convert`), or set optimisation.train=all."
    )


def decays(owner: nn.Module, name: str) -> bool:
    """Whether weight decay applies: to weights of linear layers and embeddings, gates excepted, and to adapters.

    Norms, biases, scalars (carry, erase) and mixing weights that start at one would be pulled away from their start,
    and a gate would be pulled back to it.
    """
    path = name.split(".")
    return isinstance(owner, nn.Linear | nn.Embedding) and path[-1] == "weight" and "gate" not in path


def parameter_groups(
    model: nn.Module, lr: dict[str, float], weight_decay: float, overrides: Sequence[ParameterGroup] = ()
) -> list[dict[str, Any]]:
    """Optimiser groups over every trained parameter, each in exactly one: by kind, decayed or not, and `overrides`.

    lr: learning rate by kind. Each group holds `params`, `param_names` (canonical), `lr`, `weight_decay`, and for
    reports `name`, `kind` and `count`. Raises UserError for an override that finds no trained parameter that is left.
    """
    owners = {canonical(f"{name}.x").removesuffix(".x"): module for name, module in model.named_modules()}
    groups: dict[str, dict[str, Any]] = {}
    used = set()
    for name, parameter in named_parameters(model):
        if not parameter.requires_grad:
            continue
        kind = kind_of(name)
        owner = _unwrapped(owners[name.rpartition(".")[0]])
        decay = weight_decay if decays(owner, name) else 0.0
        label, rate = kind, lr[kind]
        found = next((i for i, group in enumerate(overrides) if re.search(group.match, name)), None)
        if found is not None:
            used.add(found)
            label = overrides[found].match
            rate = rate if overrides[found].lr is None else overrides[found].lr
            decay = decay if overrides[found].weight_decay is None else overrides[found].weight_decay
        key = (label, kind, rate, decay) if found is not None else (label, decay)
        group = groups.setdefault(
            str(key),
            {
                "name": f"{label}, decayed" if decay else label,
                "kind": kind,
                "label": label,
                "lr": rate,
                "weight_decay": decay,
                "count": 0,
                "params": [],
                "param_names": [],
            },
        )
        group["params"].append(parameter)
        group["param_names"].append(name)
        group["count"] += parameter.numel()
    for index, override in enumerate(overrides):
        if index not in used:
            raise UserError(
                f"groups[{index}]: {override.match!r} matches no trained parameter that no group before it has: "
                "`transformer2 doctor` shows the names."
            )
    return list(groups.values())


def count_parameters(model: nn.Module) -> dict[str, dict[str, int]]:
    """{"new": {"trained": n, "frozen": n}, "pretrained": {...}}, in numbers; "lora" only where there are adapters."""
    counts = {kind: {"trained": 0, "frozen": 0} for kind in ("new", "pretrained")}
    for name, parameter in named_parameters(model):
        of_kind = counts.setdefault(kind_of(name), {"trained": 0, "frozen": 0})
        of_kind["trained" if parameter.requires_grad else "frozen"] += parameter.numel()
    return counts


def table(model: nn.Module, groups: list[dict[str, Any]]) -> str:
    """The groups for people, one line each, frozen parameters last."""
    rows = [("parameters", "number", "learning rate", "weight decay")]
    rows += [(g["name"], f"{g['count']:,}", f"{g['lr']:g}", f"{g['weight_decay']:g}") for g in groups]
    frozen = sum(kind["frozen"] for kind in count_parameters(model).values())
    rows.append(("frozen", f"{frozen:,}", "-", "-"))
    return "\n".join(f"{a:<22}{b:>16}{c:>16}{d:>15}" for a, b, c, d in rows)


def _unwrapped(module: nn.Module) -> nn.Module:
    return getattr(module, "base_layer", module)
