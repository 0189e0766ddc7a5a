"""MUDDFormer: multiway dynamic dense connections.

Source: Xiao et al., arXiv 2502.12170, section 2, and its PyTorch code. With X_i the output of block i, every block
but the first reads four sums over all earlier outputs, one each for queries, keys, values and residual (Q, K, V, R):

    h = GELU(N(X_i) W1) in R^K        D = h W2 + a in R^{C x (i+1)}        stream_c = sum_j D_cj X_j,  C = 4

N is an RMSNorm without gain, K = C (i+1); before the final norm C = 1. W2 = 0 and `a` one-hot on the newest output at
first: the plain Transformer, so both forms are the same operator.

PrePostDANorm (section 2.4, for deep and large models): the sources are Norm(X_j), a = 0, and stream_c = X_i +
Norm(sum), the latter with a gain of 1e-3. Also the plain Transformer at first.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, inverse_rms, weighted_sum
from .layers import QKVGains, Transformer2RMSNorm, at_least_float32

POST_NORM_GAIN = 1e-3


class MUDDFormer(Residual):
    """MUDDFormer (arXiv 2502.12170): queries, keys, values and residual read dynamic sums of all earlier outputs.

    form: both start as the plain Transformer.
    dynamic: weights that depend on the newest output, on top of the static ones.
    prepost_norm: PrePostDANorm, norms before and after the sums; the paper's choice for deep models (24 layers).
    separate_norms: gains of their own for the norms of queries, keys and values.
    expand_last: K four times as wide in the last read (in the authors' code).
    round64: K rounded up to a multiple of 64, exact multiples as well (in the authors' code).
    """

    keep_in_float32 = IN_RESIDUALS
    dormant = (r"residual\.mixture\.(w1|post_norm)$", r"residual\.mixture\.pre_norm\.weight$")

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        dynamic: bool = True,
        prepost_norm: bool = False,
        separate_norms: bool = True,
        expand_last: bool = False,
        round64: bool = False,
    ):
        super().__init__(config, layer_idx, site)
        self.mixture, self.gains = None, None
        reads = site == "model" or (site == "attn" and layer_idx > 0)  # the first block reads the embeddings
        if reads or (site == "attn" and prepost_norm):
            streams = (1 if site == "model" else 4) if reads else 0
            width = streams * (layer_idx + 1) * (4 if expand_last and site == "model" else 1)
            width = (width // 64 + 1) * 64 if round64 else width
            mixture = MultiwayMixture if not prepost_norm else NormedMultiwayMixture
            self.mixture = mixture(
                config.hidden_size, layer_idx + 1, streams, width if dynamic else 0, config.rms_norm_eps
            )
        if reads and site == "attn" and separate_norms:
            self.gains = QKVGains(config.hidden_size)

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        state, *sources = stream
        if self.site not in ("attn", "model"):
            return state, stream
        if self.mixture is None:
            return state, (state, *sources, state)
        source, *streams = self.mixture(state, *sources)
        if not streams:  # the first block
            return state, (state, *sources, source)
        if len(streams) == 1:
            return streams[0], stream
        query, key, value, residual = streams
        return torch.stack([query, key, value]), (residual, *sources, source)

    def gain(self) -> Tensor | None:
        return None if self.gains is None else self.gains()


class MultiwayMixture(nn.Module):
    """C sums over n block outputs, by weights made from the newest."""

    def __init__(self, hidden_size: int, num_sources: int, num_streams: int, width: int, eps: float):
        super().__init__()
        self.num_streams, self.num_sources, self.eps = num_streams, num_sources, eps
        self.w1 = self.w2 = None
        if num_streams:
            self.static = nn.Parameter(torch.empty(num_streams, num_sources))
        if width and num_streams:
            self.w1 = nn.Parameter(torch.empty(width, hidden_size))
            self.w2 = nn.Parameter(torch.empty(num_streams * num_sources, width))  # stream by stream
        self.weights = DepthWeights()

    def forward(self, state: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        """The newest output and the earlier ones, all [B, T, D], oldest first -> the newest as a source, C streams"""
        sums = []
        for *older, newest in self.streams(state):
            sums.append(weighted_sum(state, [*older, newest - 1], [*sources, state]))
        return state, *sums

    def streams(self, state: Tensor) -> list[tuple[Tensor, ...]]:
        """For each of C streams its n weights, [B, T, 1] (B = T = 1 if they are static), in float32 at least."""
        weights = self.static[..., None, None, None] + self.dynamic(state)
        self.weights(weights.squeeze(-1))
        return [rows.unbind(0) for rows in weights.unbind(0)]

    def dynamic(self, state: Tensor) -> Tensor | float:
        if self.w1 is None:
            return 0.0
        hidden = (state @ self.w1.to(state.dtype).T).to(at_least_float32(state.dtype)) * inverse_rms(state, self.eps)
        weights = F.gelu(hidden) @ self.w2.to(hidden.dtype).T  # [B, T, C n]
        return weights.unflatten(-1, (self.num_streams, self.num_sources)).permute(2, 3, 0, 1).unsqueeze(-1)

    def reset_parameters(self) -> None:
        if self.num_streams:
            self.reset_static()
        if self.w1 is not None:
            init.normal_(self.w1, std=self.w1.shape[1] ** -0.5)
            init.zeros_(self.w2)

    def reset_static(self) -> None:
        start = torch.zeros_like(self.static)
        start[:, -1] = 1
        init.copy_(self.static, start)


class NormedMultiwayMixture(MultiwayMixture):
    """PrePostDANorm: normalised sources, and a normalised sum on top of the newest output."""

    def __init__(self, hidden_size: int, num_sources: int, num_streams: int, width: int, eps: float):
        super().__init__(hidden_size, num_sources, num_streams, width, eps)
        self.pre_norm = Transformer2RMSNorm(hidden_size, eps)
        self.post_norm = nn.Parameter(torch.empty(num_streams, hidden_size)) if num_streams else None

    def forward(self, state: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
        source = self.pre_norm(state).to(state.dtype)
        if self.num_streams == 0:
            return (source,)
        sums = [weighted_sum(None, weights, [*sources, source]) for weights in self.streams(state)]
        return source, *(state + self.normed(total, gain) for total, gain in zip(sums, self.post_norm, strict=True))

    def normed(self, total: Tensor, gain: Tensor) -> Tensor:
        wide = total.to(at_least_float32(total.dtype))
        return (gain * (wide * inverse_rms(wide, self.eps))).to(total.dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.num_streams:
            init.constant_(self.post_norm, POST_NORM_GAIN)

    def reset_static(self) -> None:
        init.zeros_(self.static)
