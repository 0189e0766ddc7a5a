"""Which number format a run computes in.

bf16    matrix products in bfloat16 under autocast; whatever is trained is kept in float32. Frozen weights that are
        stored in bfloat16 stay so.
fp32    everything in float32
auto    on a GPU bf16 where it has it; on a CPU whichever multiplies matrices faster on this very machine, because
        bfloat16 is about twice as fast on processors that have instructions for it (AVX512-BF16, AMX), and
        several times slower on others
"""

import time
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn


def on_cpu() -> bool:
    """Whether to compute on the CPU: there is nothing else, or the launcher was told to."""
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")


def choose(precision: Literal["auto", "bf16", "fp32"]) -> Literal["bf16", "fp32"]:
    """The format to use. With several processes, the first one's measurement counts for all."""
    if precision != "auto":
        return precision
    if not on_cpu():
        return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"
    faster = min(("fp32", "bf16"), key=lambda name: _seconds(torch.bfloat16 if name == "bf16" else torch.float32))
    choice = [faster]
    if PartialState(cpu=True).num_processes > 1:  # the Accelerator that comes later shares this state
        broadcast_object_list(choice)
    return choice[0]


def load_dtype(
    precision: Literal["bf16", "fp32"], train: Literal["new", "all"], stored: set[torch.dtype]
) -> torch.dtype:
    """The type to load a checkpoint in: one that holds every stored value exactly, and float32 for what is trained.

    stored: the types of its tensors. float32 holds float16 and bfloat16 exactly, so writing the tensors back in their
    own types gives the same bytes.
    """
    frozen_in_half = precision == "bf16" and train == "new" and torch.bfloat16 in stored
    return torch.bfloat16 if frozen_in_half and torch.float16 not in stored else torch.float32


def make_masters(model: nn.Module) -> None:
    """Keep every trained parameter in float32, whatever it is stored in: bfloat16 would round small updates away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _seconds(dtype: torch.dtype) -> float:
    """The best time of a few matrix products."""
    a = torch.ones(512, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        a @ a.T
        best = min(best, time.perf_counter() - start)
    return best
