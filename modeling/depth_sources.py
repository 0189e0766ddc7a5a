"""Weighted sums over earlier states or increments of the same token: what the aggregating residuals have in common.

Two rules keep their cost linear in the number of weights. A source is never normalised, stacked or copied per read:
its inverse RMS is one number per token, so norm(v).w is (v.w) / rms(v). And nothing of width D is kept for the
backward pass but the sources themselves.

Three rules keep the identity form exact in every precision. Weights are made in float32; they are deviations from the
start ("centred"), added to the running state, so that a zero adds nothing; and they are rounded to the precision of
the state last.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .layers import at_least_float32


class DepthWeights(nn.Module):
    """Passes the weights of a read on, so that `output_depth_weights=True` can record them.

    [G, n, B, T] (or broadcastable to it): what n sources, oldest first, count for in each of G groups (heads, or the
    inputs for queries, keys, values and residual). DDL records [3, d_v, B, T]: its gate, and what multiples of the
    sublayer's output it wrote to and erased from each channel.
    """

    def forward(self, weights: Tensor) -> Tensor:
        return weights


def inverse_rms(x: Tensor, eps: float, num_heads: int = 1) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), per slice of the features: [..., D] -> [..., num_heads], in float32 at least."""
    x = x.to(at_least_float32(x.dtype)).unflatten(-1, (num_heads, -1))
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1).square() / x.shape[-1] + eps)


def weighted_sum(base: Tensor | None, weights: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """base + sum_j weights[j] * sources[j], one pass over each source. Weights broadcast to their sources."""
    for weight, source in zip(weights, sources, strict=True):
        weight = weight.to(source.dtype)
        base = weight * source if base is None else torch.addcmul(base, weight, source)
    return base


def centred_softmax(logits: Tensor) -> Tensor:
    """n softmax(logits) - 1 over n entries of the first axis: exactly zero for equal logits."""
    shares = (logits - logits.amax(0)).exp()
    return shares * (len(shares) / shares.sum(0)) - 1
