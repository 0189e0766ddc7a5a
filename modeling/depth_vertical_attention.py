r"""Vertical Attention: every layer attends over the normalised states of the layers before it.

Source: Kojima et al., "Vertical Attention" (OpenReview A6uabXKiXc), and the generic depth read of Residual Stream
Duality (arXiv 2603.16039, section 2.2). This is a RECONSTRUCTION: neither code nor the full text is public, so no
parity is claimed. With x_0 ... x_l the states before block l, N an RMSNorm without gain, and weights a over them,

    paper:      h = sum_j a_j N(x_j)
    identity:   h = x_l + 1/n sum_j (n a_j - 1) rms(x_l) N(x_j)        our extension: exactly x_l for equal weights

    static:     a = softmax(s), s one number per source                 what the paper describes
    qk:         a = softmax_j((W_Q N(x_l)).(W_K N(x_j)) / sqrt(d_k))     the duality paper's form

The paper form normalises its values and drops the residual sum, so that no parameters make it the plain Transformer.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, centred_softmax, inverse_rms, weighted_sum
from .layers import at_least_float32


class VerticalAttention(Residual):
    """Vertical Attention (OpenReview A6uabXKiXc, a reconstruction): attention over normalised states of all layers.

    form: "paper" (normalised states only) or "identity" (state plus a centred read, for pretrained models).
    weights: "static" (one logit per source, as the paper) or "qk" (query from the newest state, keys from all).
    key_dim: d_k of the queries and keys.
    """

    keep_in_float32 = IN_RESIDUALS
    dormant = (r"residual\.mixture\.logits\.key$",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        weights: Literal["qk", "static"] = "qk",
        key_dim: int = 64,
    ):
        super().__init__(config, layer_idx, site)
        self.eps = config.rms_norm_eps
        self.mixture = None
        if site in ("attn", "model"):
            logits = None
            if layer_idx > 0:  # one source needs no weights
                logits = (
                    QueryKeyLogits(config.hidden_size, key_dim, config.initializer_range, form == "identity")
                    if weights == "qk"
                    else StaticLogits(layer_idx + 1)
                )
            self.mixture = NormalisedMixture(logits, centred=form == "identity")

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if not 1 <= options["key_dim"] <= 2**16:
            raise ValueError(f"Vertical Attention needs a key_dim from 1 to 65,536, got {options['key_dim']}.")

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        if self.mixture is None:
            return stream[0], stream
        state, *history = stream  # states, then their inverse RMS
        count = len(history) // 2
        states, scales = [*history[:count], state], [*history[count:], inverse_rms(state, self.eps)]
        mixed = self.mixture(*states, *scales)
        return mixed, (mixed, *states, *scales)


class NormalisedMixture(nn.Module):
    """The weighted sum of normalised states, or a centred one on top of the newest state."""

    def __init__(self, logits: nn.Module | None, centred: bool):
        super().__init__()
        self.logits, self.centred = logits, centred
        self.weights = DepthWeights()

    def forward(self, *states_and_scales: Tensor) -> Tensor:
        """n states [B, T, D], oldest first, and their n inverse RMS [B, T, 1] -> [B, T, D]"""
        count = len(states_and_scales) // 2
        states, scales = states_and_scales[:count], states_and_scales[count:]
        newest = states[-1]
        if self.logits is None:
            return newest if self.centred else weighted_sum(None, scales, states)
        logits = self.logits(*states_and_scales)  # [n, B, T, 1]
        weights = self.weights(logits.softmax(0).permute(3, 0, 1, 2))[0].unsqueeze(-1)
        if not self.centred:
            return weighted_sum(None, [a * scale for a, scale in zip(weights, scales, strict=True)], states)
        deviations = centred_softmax(logits) / (count * scales[-1])
        return weighted_sum(newest, [c * scale for c, scale in zip(deviations, scales, strict=True)], states)


class StaticLogits(nn.Module):
    """One number per source, zero at first."""

    def __init__(self, num_sources: int):
        super().__init__()
        self.score = nn.Parameter(torch.empty(num_sources))

    def forward(self, *states_and_scales: Tensor) -> Tensor:
        """-> [n, 1, 1, 1]"""
        return self.score.view(-1, 1, 1, 1)

    def reset_parameters(self) -> None:
        init.zeros_(self.score)


class QueryKeyLogits(nn.Module):
    """(W_Q N(x_l)).(W_K N(x_j)) / sqrt(d_k) = (W_K' W_Q x_l).x_j times two inverse RMS: no key is ever made."""

    def __init__(self, hidden_size: int, key_dim: int, std: float, zero_query: bool):
        super().__init__()
        self.std, self.zero_query = std, zero_query
        self.query = nn.Parameter(torch.empty(key_dim, hidden_size))
        self.key = nn.Parameter(torch.empty(key_dim, hidden_size))

    def forward(self, *states_and_scales: Tensor) -> Tensor:
        """-> [n, B, T, 1]"""
        count = len(states_and_scales) // 2
        states, scales = states_and_scales[:count], states_and_scales[count:]
        newest, dtype = states[-1], at_least_float32(states[-1].dtype)
        query = (newest @ self.query.to(newest.dtype).T) * (scales[-1] / math.sqrt(len(self.query)))
        probe = query.to(newest.dtype) @ self.key.to(newest.dtype)
        dots = [(probe * state).sum(-1, keepdim=True, dtype=dtype) for state in states]  # overflows float16
        return torch.stack([dot * scale for dot, scale in zip(dots, scales, strict=True)])

    def reset_parameters(self) -> None:
        init.zeros_(self.query) if self.zero_query else init.normal_(self.query, std=self.std)
        init.normal_(self.key, std=self.std)
