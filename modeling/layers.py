"""Building blocks that know neither axis: Llama's norm, rotary embedding and MLP, and layers that start at zero.

They are our own copies of the mathematics, not imports from the Llama model file, because these files travel with
every checkpoint and must survive a refactoring of the library. In float32 and bfloat16 they equal Llama's bit for bit;
in float64 they stay in float64.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, the type itself otherwise."""
    return torch.promote_types(dtype, torch.float32)


class Transformer2RMSNorm(nn.Module):
    """Root mean square norm with a gain, over the last axis."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: Tensor, gain: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., D]; `gain`, broadcastable to it, comes on top of the norm's own"""
        weight = self.weight if gain is None else (self.weight * gain).to(self.weight.dtype)
        wide = hidden_states.to(at_least_float32(hidden_states.dtype))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * wide.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class Transformer2RotaryEmbedding(nn.Module):
    """Rotary position embedding of every type that transformers knows (`config.rope_parameters["rope_type"]`)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init_fn = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = rope_init_fn(config)
        # Not saved, so the library computes them again after loading: it looks for these two names.
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config, **kwargs) -> tuple[Tensor, float]:
        """Inverse frequencies [head_dim / 2] of the original RoPE, and its (absent) attention scaling."""
        return rope_frequencies(config.head_dim, config.rope_parameters["rope_theta"]), 1.0

    @dynamic_rope_update
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids [B, T] -> cosine and sine [B, T, head_dim], in the type of x"""
        inv_freq = self.inv_freq.to(device=x.device, dtype=torch.float)
        cos, sin = rotations(position_ids, inv_freq)
        return (cos * self.attention_scaling).to(x.dtype), (sin * self.attention_scaling).to(x.dtype)


def rope_frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Inverse frequencies [head_dim / 2] of the original RoPE."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim))


def rotations(position_ids: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T], [head_dim / 2] -> cosine and sine [B, T, head_dim]"""
    angles = position_ids[..., None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, head_dim], cos and sin [B, T, head_dim] -> x rotated by its positions"""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos) + (rotate_half(x) * sin)


class Transformer2MLP(nn.Module):
    """down(act(gate(x)) * up(x)); `local_mixer` may mix gate(x) and up(x) with those of nearby tokens."""

    def __init__(self, config, local_mixer: nn.Module | None = None):
        super().__init__()
        self.local_mixer = local_mixer
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, tokens: dict[str, Any] | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `tokens` is what a local mixer needs to know about them"""
        gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if self.local_mixer is not None:
            halves = self.local_mixer.mix(torch.cat((gate, up), dim=-1), **(tokens or {})).chunk(2, dim=-1)
            gate, up = (half.contiguous() for half in halves)  # kernels round by the layout of their inputs
        return self.down_proj(self.act_fn(gate) * up)


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero, so that a new branch ending in it changes nothing at first."""

    def reset_parameters(self) -> None:
        init.zeros_(self.weight)
        if self.bias is not None:
            init.zeros_(self.bias)


class QKVGains(nn.Module):
    """Gains for queries, keys and values on top of the layer's norm: together, a norm for each of the three."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 1, 1, hidden_size))

    def forward(self) -> Tensor:
        """-> [3, 1, 1, D]"""
        return self.weight

    def reset_parameters(self) -> None:
        init.ones_(self.weight)
