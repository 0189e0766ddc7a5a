"""What a variant adds to a model: parameters, and floating-point operations per token, counted and not estimated."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from transformer2 import Transformer2Config, Transformer2Model
from transformer2.configs import names, nearest_size, preset, variant
from transformer2.conversion.checkpoints import read_json
from transformer2.conversion.families import backbone_fields, read_config
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.errors import UserError
from transformer2.variants import AXES, options_of

# Operations that move numbers without computing any.
MOVES = {"clone", "copy_", "_to_copy", "cat", "stack", "embedding", "index", "index_select", "repeat_interleave"}
REDUCTIONS = {"sum", "mean", "amax", "max", "any", "all", "prod"}


class Operations(TorchDispatchMode):
    """Counts floating-point operations: matrix products as the library counts them, anything else one per element."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        elif name in REDUCTIONS:
            self.total += _floats(args[0])
        elif name not in MOVES and func._schema.returns and func._schema.returns[0].alias_info is None:
            self.total += _floats(out) * (2 if name == "addcmul" else 1)
        return out


def _floats(value: Any) -> int:
    """Elements of a floating-point tensor, or of the first of several."""
    value = value[0] if isinstance(value, tuple | list) and value else value
    return value.numel() if isinstance(value, Tensor) and value.is_floating_point() else 0


def operations_per_token(model: Transformer2Model, length: int) -> float:
    """Of a forward pass of a decoder on the meta device over `length` tokens, without the language-modelling head."""
    ids = positions = torch.zeros(1, length, dtype=torch.long, device="meta")
    masks = {"full_attention": None, "token_mask": None, "token_index": positions, "seq_idx": None}
    with torch.no_grad(), Operations() as counted:
        model(ids, attention_mask=masks, position_ids=positions, use_cache=False)
    return counted.total / length


def cost(config: Transformer2Config, residual: Any = "standard", local_mixer: Any = "none", length: int = 128):
    """Parameters and operations per token of a model with these variants, and what they are more than without."""
    fields = {key: value for key, value in config.to_dict().items() if key in Transformer2Config.__annotations__}
    figures: dict[str, dict[str, float]] = {}
    for name, axes in (("plain", ("standard", "none")), ("variant", (residual, local_mixer))):
        with torch.device("meta"):
            model = Transformer2Model(
                Transformer2Config(**{**fields, "residual": axes[0], "local_mixer": axes[1]})
            ).eval()
        flops = operations_per_token(model, length)
        figures[name] = {"parameters": sum(p.numel() for p in model.parameters()), "flops": flops}
    plain, variant = figures["plain"], figures["variant"]
    return {
        "parameters": int(variant["parameters"]),
        "extra_parameters": int(variant["parameters"] - plain["parameters"]),
        "flops_per_token": math.ceil(variant["flops"]),
        "extra_flops_per_token": math.ceil(variant["flops"] - plain["flops"]),
        "extra_flops_share": (variant["flops"] - plain["flops"]) / plain["flops"],
    }


def costs_of(model: str | Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What every variant, with the options of its preset in the identity form, adds to a model, by axis and type.

    model: the folder of a Llama or of one of ours, or the size of a preset. Raises UserError for anything else.
    """
    size, config = _shape(model)
    table = {}
    for axis, kinds in AXES.items():
        for kind in kinds:
            options = variant(axis, kind, size)
            if "form" in options_of(axis, kind):
                options["form"] = "identity"
            try:
                table[axis, kind] = cost(config, **{axis: options})
            except ValueError as error:  # the model is too small for these options
                table[axis, kind] = {"not_applicable": str(error)}
    return table


@plain_os_errors()
def _shape(model: str | Path) -> tuple[str, Transformer2Config]:
    if str(model) in names("sizes"):
        return str(model), preset(f"standard-{model}")
    folder = user_path(model)
    if not folder.is_dir():
        raise UserError(f"There is no folder {model}, nor a size of that name; sizes: {', '.join(names('sizes'))}.")
    fields = backbone_fields(read_config(read_json(folder / "config.json")))
    fields = {key: value for key, value in fields.items() if key in Transformer2Config.__annotations__}
    try:
        shape = Transformer2Config(**{**fields, "residual": "standard", "local_mixer": "none"})
        return nearest_size(shape), shape
    except (ValueError, TypeError) as error:
        raise UserError(f"The config.json of {model} does not describe a model: {error}") from error
