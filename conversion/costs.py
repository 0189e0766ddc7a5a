"""What a variant adds to a model: parameters, and floating-point operations per token, counted and not estimated."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from transformer2 import Transformer2Config, Transformer2Model

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
