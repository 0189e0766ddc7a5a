"""Local mixers move information along the sequence axis, between nearby tokens, before global attention does.

Nothing here knows about caches but `LeftContext`, which gives any operator the entries before its input: zeros before
the first token, the cached ones while decoding. A mixer that uses it works with every cache, beam search and padding.
"""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class LocalMixer(nn.Module):
    """No local mixing: the plain Transformer.

    Also the interface of its variants: override `forward`, `check` and `cache_slots`. Options are the keyword-only
    arguments of the constructor; `layers`, which every mixer has, lists the layers that get one (default: all).
    """

    dormant: tuple[str, ...] = ()  # patterns of parameters without gradient at the first step of the identity form
    bitwise = True  # whether the identity form starts as the plain Transformer bit for bit

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx

    @classmethod
    def check(cls, config, **options: Any) -> None:
        """Raise ValueError, naming cause and remedy, for option values that make no sense."""

    @classmethod
    def cache_slots(cls, config, **options: Any) -> int:
        """How many `LeftContext`s one layer's mixer keeps in the cache."""
        return 0

    @classmethod
    def idle(cls, config, **options: Any) -> tuple[str, ...]:
        """Patterns of parameters that never have a gradient, because they cannot change the output."""
        return ()

    def forward(self, x: Tensor, **tokens: Any) -> Tensor:
        """[B, T, D] -> [B, T, D]. `tokens` holds `cache`, `token_mask`, `position_ids`, `token_index`, `seq_idx`."""
        raise NotImplementedError


def has_local_mixer(config, layer_idx: int) -> bool:
    """Whether this layer has a local sublayer."""
    layers = config.local_mixer.get("layers")
    return config.local_mixer["type"] != "none" and (layers is None or layer_idx in layers)


class LeftContext(nn.Module):
    """Prepends the `size` entries before x: the cached ones while decoding, zeros before the first token.

    Parameter-free. It keeps its entries in row `layer_idx` of the cache, in the `slot` that the model assigns.
    """

    def __init__(self, size: int, layer_idx: int):
        super().__init__()
        self.size, self.layer_idx, self.slot = size, layer_idx, 0

    def forward(self, x: Tensor, cache=None, token_mask: Tensor | None = None, **tokens: Any) -> Tensor:
        """[B, T, C] -> [B, size + T, C]; padding, where `token_mask` [B, T] is false, enters as zeros"""
        if self.size == 0:
            return x
        if token_mask is not None:
            x = x.masked_fill(~token_mask.unsqueeze(-1), 0)
        length = self.size + x.shape[1]
        if cache is not None:
            x = cache.update_conv_state(x.mT, self.layer_idx, state_idx=self.slot, conv_kernel_size=self.size).mT
        # The cache returns less than `length` at first, and more while it records what it may have to roll back.
        return F.pad(x, (0, 0, max(length - x.shape[1], 0), 0))[:, -length:]


def taps(x: Tensor, num_taps: int, seq_idx: Tensor | None = None) -> Iterator[Tensor]:
    """The inputs of a causal convolution: x [B, num_taps - 1 + T, ...] -> `num_taps` times [B, T, ...], oldest first.

    With `seq_idx` [B, T], the number of the packed document that a token belongs to, other documents read as zeros.
    """
    length = x.shape[1] - num_taps + 1
    for tap in range(num_taps):
        entries, back = x[:, tap : tap + length], num_taps - 1 - tap
        if seq_idx is not None and back:
            same = F.pad(seq_idx, (back, 0), value=-1)[:, :length] == seq_idx
            entries = entries * same.view(*same.shape, *[1] * (entries.dim() - 2)).to(entries.dtype)
        yield entries
