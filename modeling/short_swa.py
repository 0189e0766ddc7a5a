"""Short sliding-window attention (ShortSWA), the one local operator of this model, over any ordered axis.

    tokens of one layer    [B, H, T, d]          sequence_short_swa.py
    layers of one token    [B, T, H, L, d]       depth_short_swa.py

Source: Residual Stream Duality (arXiv 2603.16039), sections 2.2 and 2.4. Along the sequence everything is there at
once; along depth the layers arrive one after another, so the depth read is the decoding step of the same operator.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ZeroLinear, at_least_float32


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    *,
    valid: Tensor | None = None,
    reach: Tensor | None = None,
    seq_idx: Tensor | None = None,
    record: Callable[[Tensor], Any] | None = None,
) -> Tensor:
    """Causal attention of every query over the last `window` entries of the second-to-last axis, itself included.

    query [..., H, Q, d], key and value [..., G, K, d] with H a multiple of G -> [..., H, Q, d]. The last query is
    aligned with the last key: Q = K is a whole sequence, Q = 1 is one step of it. Scores are scaled by d ** -0.5.

    valid [..., K]: false for keys that do not exist (padding, before the start). A query always sees itself.
    reach [..., Q]: how many earlier entries each query may look back at most (chunk-aligned windows).
    seq_idx [..., K]: entries of different packed documents do not see each other.
    record: for one step (Q = 1), is told the weights [..., H, K].

    No T x T matrix is ever built: long inputs go block by block, O(Q * window) in time and memory.
    """
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    if num_keys > window + num_queries - 1:  # nothing further back is ever seen
        surplus = num_keys - (window + num_queries - 1)
        key, value = key[..., surplus:, :], value[..., surplus:, :]
        valid = valid[..., surplus:] if valid is not None else None
        seq_idx = seq_idx[..., surplus:] if seq_idx is not None else None
        num_keys -= surplus
    if num_queries == 1:
        return _one_step(query, key, value, valid, reach, seq_idx, record)
    if num_queries <= 2 * window:
        distance = _distances(num_queries, num_keys, query.device)
        mask = _visible(distance, window, valid, reach, seq_idx, seq_idx)
        return _attend(query, key, value, mask)
    return _blocked(query, key, value, window, valid, reach, seq_idx)


def _distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """[Q, K], how far each key lies behind each query."""
    steps = torch.arange(num_keys, device=device)
    return steps[num_keys - num_queries :, None] - steps


def _visible(distance, window, valid, reach, query_idx, key_idx) -> Tensor:
    """[..., Q, K], true where a query sees a key. `query_idx` may be as long as `key_idx`: its last entries count."""
    visible = (distance >= 0) & (distance < window)
    if valid is not None:
        visible = visible & valid.unsqueeze(-2)
    if reach is not None:
        visible = visible & (distance <= reach.unsqueeze(-1))
    if key_idx is not None:
        visible = visible & (query_idx[..., -distance.shape[0] :].unsqueeze(-1) == key_idx.unsqueeze(-2))
    return visible | (distance == 0)  # a padding query sees itself: an empty row would be NaN


def _attend(query, key, value, mask) -> Tensor:
    """One dense call; the mask [..., Q, K] holds for every head."""
    if mask.dim() > 2:
        mask = mask.unsqueeze(-3)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=query.shape[-3] != key.shape[-3]
    )


def _one_step(query, key, value, valid, reach, seq_idx, record) -> Tensor:
    """Q = 1: the keys are the window. Elementwise, because depth reads have B * T of these tiny attentions."""
    groups, dtype = query.shape[-3] // key.shape[-3], value.dtype
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    query, key, value = (x.to(at_least_float32(dtype)) for x in (query, key, value))  # products overflow float16
    scores = (query * key).sum(-1) * query.shape[-1] ** -0.5  # [..., H, K]
    if valid is not None or reach is not None or seq_idx is not None:
        distance = _distances(1, key.shape[-2], query.device)
        visible = _visible(distance, key.shape[-2], valid, reach, seq_idx, seq_idx)  # [..., 1, K]
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1)
    if record is not None:
        record(weights)
    return (weights.unsqueeze(-1) * value).sum(-2, keepdim=True).to(dtype)


def _blocked(query, key, value, window, valid, reach, seq_idx) -> Tensor:
    """query [B, H, Q, d]: each block of `window` queries sees its own block of keys and the one before."""
    batch, num_queries = query.shape[0], query.shape[-2]
    num_blocks = -(-num_queries // window)
    before = num_blocks * window - num_queries  # missing on the left, so that the last entries stay aligned
    missing = (num_blocks + 1) * window - key.shape[-2]

    def shifted(x: Tensor, left: int, dim: int, fill: int | bool = 0) -> Tensor:
        """`left` more entries in front, or so many fewer."""
        at_dim = (0, 0) if dim == -2 else ()
        return F.pad(x, (*at_dim, left, 0), value=fill) if left >= 0 else x.narrow(dim, -left, x.shape[dim] + left)

    def blocks(x: Tensor, left: int, size: int, fill: int | bool = 0) -> Tensor:  # [B, N] -> [B * blocks, size]
        return shifted(x, left, -1, fill).unfold(-1, size, window).flatten(0, 1)

    def vectors(x: Tensor, left: int, size: int) -> Tensor:  # [B, H, N, d] -> [B * blocks, H, size, d], views if B = 1
        return shifted(x, left, -2).unfold(-2, size, window).mT.movedim(2, 1).flatten(0, 1)

    exists = torch.ones(1, key.shape[-2], dtype=torch.bool, device=key.device) if valid is None else valid
    exists = blocks(exists.expand(batch, -1), missing, 2 * window, False)
    reach = None if reach is None else blocks(reach.expand(batch, -1), before, window)
    query_idx = key_idx = None
    if seq_idx is not None:
        key_idx = blocks(seq_idx.expand(batch, -1), missing, 2 * window, -1)
        query_idx = key_idx
    mask = _visible(_distances(window, 2 * window, query.device), window, exists, reach, query_idx, key_idx)

    out = _attend(vectors(query, before, window), *(vectors(x, missing, 2 * window) for x in (key, value)), mask)
    return out.unflatten(0, (batch, num_blocks)).movedim(1, 2).flatten(2, 3)[..., before:, :]


class ShortSWA(nn.Module):
    """The learned projections around `windowed_attention`; whoever calls it picks the axis.

    Their names avoid attention's `q_proj ... o_proj`, so that LoRA on attention does not silently adapt them. With
    `zero_output` the output projection starts at zero: the branch is silent at first and alive from the first step.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int, zero_output: bool
    ):
        super().__init__()
        self.head_dim, self.window = head_dim, window
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.key = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.output = (ZeroLinear if zero_output else nn.Linear)(num_heads * head_dim, hidden_size, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[..., N, heads * d] -> [..., heads, N, d]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)

    def merge(self, mixed: Tensor) -> Tensor:
        """[..., H, N, d] -> [..., N, D]"""
        return self.output(mixed.transpose(-2, -3).flatten(-2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, record: Callable | None = None) -> Tensor:
        """Projections [..., Q, H d], [..., K, G d] and [..., K, G d], the last of each aligned -> [..., Q, D]"""
        query, key, value = self.split(query), self.split(key), self.split(value)
        return self.merge(windowed_attention(query, key, value, self.window, record=record))

    def forward(self, query: Tensor, entries: Tensor) -> Tensor:
        """query [..., Q, D] over entries [..., K, D], ordered, the last of both aligned -> [..., Q, D]"""
        return self.attend(self.query(query), self.key(entries), self.value(entries))
