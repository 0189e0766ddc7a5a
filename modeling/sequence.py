"""Local mixers move information along the sequence axis, between nearby tokens, before global attention does.

A mixer has one or several places in a layer:

    layer       a sublayer of its own in front of attention, with a norm: its output is the update of a residual
    attn, mlp   the normalised input of attention or the MLP          qkv    queries, keys and values, side by side
    gate_up     the MLP's gate and up projections, side by side       embedding    the embeddings, before layer 0

Everywhere but at "layer" it adds to what it reads, or (`replaces_input`) takes its place.

Nothing here knows about caches but `LeftContext`, which gives any operator the entries before its input: zeros before
the first token, the cached ones while decoding. A mixer that uses it works with every cache, beam search and padding.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

Place = Literal["layer", "attn", "mlp", "qkv", "gate_up", "embedding"]


class LocalMixer(nn.Module):
    """No local mixing: the plain Transformer.

    Also the interface of its variants: override `forward`, `places` and `check`. One instance per place. Options are
    the keyword-only arguments of the constructor; `layers`, which every mixer has, lists the layers that get one
    (default: all).
    """

    replaces_input = False  # whether the output takes the place of the input, rather than being added to it

    dormant: tuple[str, ...] = ()  # patterns of parameters without gradient at the first step of the identity form
    bitwise = True  # whether the identity form starts as the plain Transformer bit for bit

    def __init__(self, config, layer_idx: int, place: Place):
        super().__init__()
        self.layer_idx, self.place = layer_idx, place

    @classmethod
    def check(cls, config, **options: Any) -> None:
        """Raise ValueError, naming cause and remedy, for option values that make no sense."""

    @classmethod
    def places(cls, config, **options: Any) -> tuple[Place, ...]:
        """Where the mixer is in a layer that has one. Each place keeps one `LeftContext` in the cache."""
        return ()

    @classmethod
    def idle(cls, config, **options: Any) -> tuple[str, ...]:
        """Patterns of parameters that never have a gradient, because they cannot change the output."""
        return ()

    def forward(self, x: Tensor, **tokens: Any) -> Tensor:
        """[B, T, C] -> [B, T, C]. `tokens` holds `cache`, `token_mask`, `position_ids`, `token_index`, `seq_idx`."""
        raise NotImplementedError

    def mix(self, x: Tensor, **tokens: Any) -> Tensor:
        """What stands where x stood, at any place but "layer": [B, T, C] -> [B, T, C]"""
        return self(x, **tokens) if self.replaces_input else x + self(x, **tokens)


def width_of(config, place: Place) -> int:
    """Features at a place."""
    if place == "qkv":
        return (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return 2 * config.intermediate_size if place == "gate_up" else config.hidden_size


def in_layer(config, layer_idx: int) -> bool:
    """Whether this layer is one of those that get local mixers."""
    layers = config.local_mixer.get("layers")
    return layers is None or layer_idx in layers


def has_local_sublayer(config, layer_idx: int) -> bool:
    """Whether this layer has a local sublayer: every type but Canon names its one place in the option "site"."""
    return config.local_mixer.get("site") == "layer" and in_layer(config, layer_idx)


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
