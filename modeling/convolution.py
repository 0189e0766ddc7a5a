"""Causal depthwise convolution over tokens, the operator of ShortConv and Canon layers.

    conv(x)_t = bias + sum_k weight[k] * x_(t - k)          one filter per feature, zeros before the first token

The weight is [K, C], oldest tap first, as `taps` counts; padding and other packed documents read as zeros.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .sequence import LeftContext, taps


class ShortConvolution(nn.Module):
    """The convolution with its memory of the last K - 1 tokens.

    Starts as torch's Conv1d does, uniform within 1 / sqrt(K), or at zero.
    """

    def __init__(self, width: int, kernel_size: int, bias: bool, layer_idx: int, zero: bool):
        super().__init__()
        self.zero = zero
        self.weight = nn.Parameter(torch.empty(kernel_size, width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.context = LeftContext(kernel_size - 1, layer_idx)

    def forward(self, x: Tensor, seq_idx: Tensor | None = None, **tokens: Any) -> Tensor:
        """[B, T, C] -> [B, T, C]"""
        entries = self.context(x, **tokens)
        inputs = taps(entries, len(self.weight), seq_idx)
        weights = self.weight.to(x.dtype).unbind(0)
        out = next(inputs) * weights[0]
        for weight, entry in zip(weights[1:], inputs, strict=True):
            out = torch.addcmul(out, weight, entry)
        return out if self.bias is None else out + self.bias.to(x.dtype)

    def reset_parameters(self) -> None:
        if self.zero:
            init.zeros_(self.weight)
        else:
            bound = len(self.weight) ** -0.5
            init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            init.zeros_(self.bias)
