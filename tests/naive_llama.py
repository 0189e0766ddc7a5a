"""A plain Llama, piece by piece, as the naive references of the depth variants need it. Nothing here is ours.

Everything is written out from the definitions: token by token where that is the definition, no cache, no padding.
`sizes` is a dict: layers, head_dim, eps, theta, and `local_mixer` (its type and window).
"""

from typing import Any

import torch
from torch import Tensor

Parameters = dict[str, Tensor]
Sizes = dict[str, Any]


def rms(x: Tensor, eps: float) -> Tensor:
    return (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without a gain"""
    return x / rms(x, eps)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / 2**0.5))


def weighted_sum(weights: Tensor, sources: list[Tensor]) -> Tensor:
    """sum_j weights_j sources_j, with weights [n] or [n, B, T]"""
    return torch.einsum("n,nbtd->btd" if weights.dim() == 1 else "nbt,nbtd->btd", weights, torch.stack(sources))


def rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE (Su et al., 2021) of x [B, T, H, d] in Llama's layout: feature j is paired with feature j + d / 2."""
    length, dim = x.shape[1], x.shape[-1]
    # Llama makes this table in float32, whatever the model computes in.
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angle = torch.arange(length).float()[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """q [B, T, H, d], k and v [B, T, H_kv, d] -> [B, T, H d]; windows count the token itself."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    outputs = []
    for t in range(q.shape[1]):
        first = 0 if window is None else max(0, t - window + 1)
        scores = torch.einsum("bhd,bshd->bhs", q[:, t], k[:, first : t + 1]) / q.shape[-1] ** 0.5
        outputs.append(torch.einsum("bhs,bshd->bhd", scores.softmax(-1), v[:, first : t + 1]).flatten(1))
    return torch.stack(outputs, dim=1)


class Llama:
    """The sublayers of a Llama, each with its norm, for references that only differ in what goes between them."""

    def __init__(self, p: Parameters, sizes: Sizes):
        self.p, self.sizes = p, sizes
        self.layers, self.eps = sizes["layers"], sizes["eps"]
        self.has_local = sizes["local_mixer"]["type"] != "none"

    def embed(self, ids: Tensor) -> Tensor:
        return self.p["model.embed_tokens.weight"][ids]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.p[f"model.{name}.weight"] * rms_norm(x, self.eps)

    def logits(self, x: Tensor) -> Tensor:
        return self.norm("norm", x) @ self.p["lm_head.weight"].T

    def attention(self, layer: int, q_in: Tensor, k_in: Tensor | None = None, v_in: Tensor | None = None) -> Tensor:
        """Attention of a layer; k_in and v_in where they differ from q_in. Separate norms are in `gains`, if any."""
        gains = self.p.get(f"model.layers.{layer}.attn_residual.gains.weight", torch.ones(3, 1, 1, 1).to(q_in))
        k_in, v_in = q_in if k_in is None else k_in, q_in if v_in is None else v_in
        name, head_dim = f"layers.{layer}.self_attn", self.sizes["head_dim"]
        heads = []
        for projection, gain, x in zip("qkv", gains, (q_in, k_in, v_in), strict=True):
            normed = gain * self.norm(f"layers.{layer}.input_layernorm", x)
            heads.append((normed @ self.p[f"model.{name}.{projection}_proj.weight"].T).unflatten(-1, (-1, head_dim)))
        q, k, v = heads
        theta = self.sizes["theta"]
        return causal_attention(rotate(q, theta), rotate(k, theta), v) @ self.p[f"model.{name}.o_proj.weight"].T

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        normed = self.norm(f"layers.{layer}.post_attention_layernorm", x)
        gate, up, down = (self.p[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def local(self, layer: int, x: Tensor) -> Tensor:
        """ShortSWA(Norm(H)) of S = H + ShortSWA(Norm(H)) (arXiv 2603.16039, section 2.4), or 0 without it."""
        if not self.has_local:
            return torch.zeros_like(x)
        normed = self.norm(f"layers.{layer}.local_layernorm", x)
        name = f"model.layers.{layer}.local_mixer.swa"
        q, k, v = (
            (normed @ self.p[f"{name}.{part}.weight"].T).unflatten(-1, (-1, self.sizes["head_dim"]))
            for part in ("query", "key", "value")
        )
        theta, window = self.sizes["theta"], self.sizes["local_mixer"]["window"]
        return causal_attention(rotate(q, theta), rotate(k, theta), v, window) @ self.p[f"{name}.output.weight"].T
