r"""Manifold-Constrained Hyper-Connections (mHC): the streams are mixed by doubly stochastic matrices.

Source: DeepSeek-AI, arXiv 2512.24880, section 4; order of the Sinkhorn steps as in DeepSeek-V4. With H in R^{n x D}
the streams of a token and z = RMSNorm(vec(H)) in R^{nD},

    H_pre = sigmoid(a_1 z W_pre + b_pre)     H_post = 2 sigmoid(a_2 z W_post + b_post)
    H_res = Sinkhorn(a_3 mat(z W_res) + b_res)             h = H_pre H        H' = H_res H + H_post' F(h)

W and b are unpublished. We start b_pre skewed, 0.7 on one stream, taking turns, and the rest on the others, so that
H_pre sums to one and the streams part; b_post = 0, so that H_post = 1; and b_res near the identity. With W = 0, the
identity form, and the mean of the streams at the end, that is the plain Transformer up to rounding: about 1e-6
relative in float32, because the shares of H_pre and the rows of H_res sum to one only up to rounding.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .depth import Site
from .depth_hyper_connections import ParallelStreams, check_scale
from .depth_sources import DepthWeights, inverse_rms
from .layers import at_least_float32

FAVOURED = 0.7  # what one stream gives to a read at first
STAY = 4.0  # logit of the diagonal of H_res at first: streams keep 95 % of themselves (n = 4)


class ManifoldHyperConnections(ParallelStreams):
    """Manifold-Constrained Hyper-Connections (arXiv 2512.24880): streams mixed by doubly stochastic matrices.

    form: "paper" (random dynamic weights) or "identity" (zero ones, for pretrained models; equal up to rounding).
    num_streams: n.
    sinkhorn_iters: steps of the projection onto doubly stochastic matrices.
    sinkhorn_eps: added to H_pre and within the projection (1e-6 in DeepSeek-V4).
    alpha_start: the weights a of the dynamic parts at first.
    start: H_pre at first: "skew" (one stream dominates, taking turns) or "symmetric" (all alike: streams never part).
    reduce: "mean" or "sum" of the streams at the end.
    """

    bitwise = False
    dormant = (r"_residual\.connection\.(alpha|mix_bias)$",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        num_streams: int = 4,
        sinkhorn_iters: int = 20,
        sinkhorn_eps: float = 0.0,
        alpha_start: float = 0.01,
        start: Literal["skew", "symmetric"] = "skew",
        reduce: Literal["mean", "sum"] = "mean",
    ):
        super().__init__(config, layer_idx, site, num_streams, reduce)
        if site in ("attn", "mlp"):
            turn = (2 * layer_idx + (site == "mlp")) % num_streams
            favoured = FAVOURED if start == "skew" and num_streams > 1 else 1 / num_streams
            self.connection = ManifoldConnection(
                config.hidden_size,
                num_streams,
                sinkhorn_iters,
                sinkhorn_eps,
                config.rms_norm_eps,
                config.initializer_range if form == "paper" else 0.0,
                alpha_start,
                read_start(num_streams, turn, favoured),
            )

    @classmethod
    def check(cls, config, **options: Any) -> None:
        super().check(config, **options)
        if options["num_streams"] < 2:
            raise ValueError("mHC mixes streams, so it needs num_streams >= 2; 4 is usual.")
        if not 1 <= options["sinkhorn_iters"] <= 1000:
            raise ValueError(f"mHC needs sinkhorn_iters from 1 to 1000, got {options['sinkhorn_iters']}; 20 is usual.")
        if not 0 <= options["sinkhorn_eps"] < 0.1:
            raise ValueError(f"mHC needs 0 <= sinkhorn_eps < 0.1, got {options['sinkhorn_eps']}.")
        check_scale("mHC", "alpha_start", options["alpha_start"])
        if options["form"] == "identity" and options["start"] == "symmetric":
            raise ValueError(
                "mHC's streams receive the same updates for ever from start=symmetric in the identity form: use "
                "start=skew."
            )
        if options["form"] == "identity" and options["sinkhorn_eps"] > 0:
            raise ValueError("mHC's identity form needs sinkhorn_eps=0: it is added to what sums to one.")

    @classmethod
    def idle(cls, config, **options: Any) -> tuple[str, ...]:
        # The first sublayer mixes equal streams, and after the last only their mean counts, which mixing keeps.
        last = config.num_hidden_layers - 1
        return (
            r"layers\.0\.attn_residual\.connection\.mix_bias$",
            rf"layers\.{last}\.mlp_residual\.connection\.mix_bias$",
        )


def read_start(num_streams: int, turn: int, favoured: float) -> list[float]:
    """What each stream gives to the read at first; sums to one."""
    others = (1 - favoured) / max(num_streams - 1, 1)
    return [favoured if stream == turn else others for stream in range(num_streams)]


class ManifoldConnection(nn.Module):
    """Weights made from all streams of a token together."""

    def __init__(
        self,
        hidden_size: int,
        num_streams: int,
        iterations: int,
        sinkhorn_eps: float,
        norm_eps: float,
        std: float,
        alpha_start: float,
        read_start: list[float],
    ):
        super().__init__()
        self.num_streams, self.iterations, self.sinkhorn_eps = num_streams, iterations, sinkhorn_eps
        self.norm_eps, self.std, self.alpha_start, self.read_start = norm_eps, std, alpha_start, read_start
        n = num_streams
        self.phi = nn.Parameter(torch.empty(2 * n + n * n, n * hidden_size))  # rows: read, write, mixing (from x to)
        self.alpha = nn.Parameter(torch.empty(3))
        self.read_bias = nn.Parameter(torch.empty(n))
        self.write_bias = nn.Parameter(torch.empty(n))
        self.mix_bias = nn.Parameter(torch.empty(n, n))
        self.weights = DepthWeights()

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, n, D] -> H_pre [B, T, n], H_res' - I [B, T, n, n] (row: from), H_post - 1 [B, T, n]"""
        read, mixing, write = self.values(streams)
        self.weights(read.permute(2, 0, 1).unsqueeze(0))
        identity = torch.eye(self.num_streams, dtype=mixing.dtype, device=mixing.device)
        return tuple(weights.to(streams.dtype) for weights in (read, mixing - identity, write - 1))

    def values(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre, H_res' and H_post, in float32 at least"""
        n, flat = self.num_streams, streams.flatten(-2)
        dtype = at_least_float32(streams.dtype)
        z = (flat @ self.phi.to(flat.dtype).T).to(dtype) * inverse_rms(flat, self.norm_eps)
        z_read, z_write, z_mix = z.split((n, n, n * n), dim=-1)
        read = (self.alpha[0] * z_read + self.read_bias).sigmoid() + self.sinkhorn_eps
        write = 2 * (self.alpha[1] * z_write + self.write_bias).sigmoid()
        mixing = self.alpha[2] * z_mix.unflatten(-1, (n, n)) + self.mix_bias
        return read, sinkhorn(mixing, self.iterations, self.sinkhorn_eps), write

    def reset_parameters(self) -> None:
        init.normal_(self.phi, std=self.std) if self.std else init.zeros_(self.phi)
        init.constant_(self.alpha, self.alpha_start)
        logits = [math.log(share / (1 - share)) for share in self.read_start]
        init.copy_(self.read_bias, torch.tensor(logits).to(self.read_bias))
        init.zeros_(self.write_bias)
        init.copy_(self.mix_bias, STAY * torch.eye(self.num_streams).to(self.mix_bias))


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Positive matrices [..., n, n] with rows and columns that sum to one, the last exactly: exp(logits), rescaled.

    Sinkhorn and Knopp: rows (a softmax) and columns in turns, `iterations` times, ending on the columns.
    """
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix
