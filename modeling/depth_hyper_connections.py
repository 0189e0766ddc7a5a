r"""Hyper-Connections: n parallel residual streams, mixed by small learned matrices.

Source: Zhu et al., arXiv 2409.19606, sections 2 and 3. The state of a token is H in R^{n x D}, n copies of the
embedding at first. A sublayer F reads h and rewrites H:

    h = A_m' H        H' = A_r' H + B' F(h)                       A_m, B in R^n,  A_r in R^{n x n}

    dynamic:   N = norm(H)     B = s_b tanh(N W_b) + B_0          A_m = s_a tanh(N W_m) + A_m0, A_r alike

W = 0, s = 0.01, B_0 = 1, A_r0 = I and A_m0 one-hot, taking turns, at first. Then all streams equal the plain state.
The paper reads their sum at the end, n times that state (which the final norm undoes but for its eps); the identity
form reads their mean, exactly that state.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, inverse_rms
from .layers import at_least_float32


class ParallelStreams(Residual):
    """The flow of n streams [B, T, n, D]; a variant brings the `connection`, at the sites "attn" and "mlp".

    A connection takes H and returns read weights [B, T, n], stream mixing weights minus the identity [B, T, n, n] (row
    from, column to), and write weights minus one [B, T, n]. The stream is (mean over streams, H) between blocks; in
    between, the weights follow. The local sublayer reads the mean and adds to all streams.
    """

    keep_in_float32 = IN_RESIDUALS

    def __init__(self, config, layer_idx: int, site: Site, num_streams: int, reduce: str):
        super().__init__(config, layer_idx, site)
        self.num_streams, self.reduce = num_streams, reduce

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if not 1 <= options["num_streams"] <= config.hidden_size:
            raise ValueError(
                f"num_streams must lie between 1 and hidden_size={config.hidden_size}, got {options['num_streams']}; "
                "4 is usual."
            )
        if options["form"] == "identity" and options["reduce"] == "sum":
            raise ValueError("The identity form reads the mean of its streams at the end: use reduce=mean.")

    def open(self, embeddings: Tensor, **tokens: Any) -> Stream:
        return (embeddings, embeddings.unsqueeze(-2).expand(-1, -1, self.num_streams, -1))

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        if self.site == "local":
            return stream[0], stream
        if self.site == "model":
            return stream[0] * (self.num_streams if self.reduce == "sum" else 1), stream
        mean, streams = stream
        read, *weights = self.connection(streams)
        with maybe_autocast(streams.device.type, enabled=False):  # the streams keep the precision that they have
            return (read.unsqueeze(-2) @ streams).squeeze(-2), (mean, streams, *weights)

    def write(self, stream: Stream, update: Tensor, read: Tensor, context: Tensor, **tokens: Any) -> Stream:
        mean, streams, *weights = stream
        written = streams + update.unsqueeze(-2)
        if self.site == "local":
            return (mean + update, written)
        mixing, gates = (tensor.flatten(0, 1) for tensor in weights)
        update = update.to(streams.dtype).flatten(0, 1).unsqueeze(-2)
        with maybe_autocast(streams.device.type, enabled=False):
            streams = torch.baddbmm(written.flatten(0, 1), mixing.mT, streams.flatten(0, 1))
            streams = torch.baddbmm(streams, gates.unsqueeze(-1), update).view_as(written)
        return (mean_of(streams) if self.site == "mlp" else mean, streams)


def check_scale(name: str, option: str, value: float) -> None:
    """Raise ValueError for a scale at which the dynamic part, zero at first, would stay so, or is absurd."""
    if not 1e-6 <= abs(value) <= 1e3:
        raise ValueError(
            f"{name} scales dynamic weights that start at zero, so {option} must lie between 1e-6 and 1e3 (0 would "
            f"keep them at zero for ever), got {value}; 0.01 is usual."
        )


def mean_of(streams: Tensor) -> Tensor:
    """[B, T, n, D] -> [B, T, D], exactly the stream where all are equal"""
    first = streams[..., 0, :]
    return first + (streams - first.unsqueeze(-2)).mean(-2)


class HyperConnections(ParallelStreams):
    """Hyper-Connections (arXiv 2409.19606): n residual streams, mixed by learned, optionally dynamic, matrices.

    form: "paper" (sum of the streams at the end) or "identity" (their mean, for pretrained models).
    num_streams: n.
    dynamic: mixing weights that depend on the streams, on top of static ones.
    scale_start: s, the weight of the dynamic part at first.
    tanh: bounds the dynamic part.
    reduce: "sum" or "mean" of the streams at the end; None for what the form implies.
    """

    dormant = (r"_residual\.connection\.(read_scale|write_scale|gain)$",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        num_streams: int = 4,
        dynamic: bool = True,
        scale_start: float = 0.01,
        tanh: bool = True,
        reduce: Literal["sum", "mean"] | None = None,
    ):
        super().__init__(config, layer_idx, site, num_streams, reduce or ("sum" if form == "paper" else "mean"))
        if site in ("attn", "mlp"):
            turn = (2 * layer_idx + (site == "mlp")) % num_streams
            if dynamic:
                self.connection = DynamicConnection(
                    config.hidden_size, num_streams, turn, config.rms_norm_eps, scale_start, tanh
                )
            else:
                self.connection = Connection(num_streams, turn)

    @classmethod
    def check(cls, config, **options: Any) -> None:
        super().check(config, **options)
        check_scale("Hyper-Connections", "scale_start", options["scale_start"])


class Connection(nn.Module):
    """Static weights: row s of `read_and_mix` says what stream s gives to the read (column 0) and to the streams."""

    def __init__(self, num_streams: int, turn: int):
        super().__init__()
        self.num_streams, self.turn = num_streams, turn
        self.read_and_mix = nn.Parameter(torch.empty(num_streams, 1 + num_streams))
        self.write = nn.Parameter(torch.empty(num_streams))
        self.weights = DepthWeights()

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, n, D] -> A_m [B, T, n], A_r - I [B, T, n, n], B - 1 [B, T, n], in the precision of the streams"""
        read_and_mix, write = self.values(streams)
        identity = torch.eye(self.num_streams, dtype=write.dtype, device=write.device)
        read, mixing = read_and_mix[..., 0], read_and_mix[..., 1:] - identity
        self.weights(read.permute(2, 0, 1).unsqueeze(0))
        return read.to(streams.dtype), mixing.to(streams.dtype), (write - 1).to(streams.dtype)

    def values(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """A_m and A_r as [B, T, n, 1 + n], and B as [B, T, n]"""
        batch = streams.shape[:2]
        return self.read_and_mix.expand(*batch, -1, -1), self.write.expand(*batch, -1)

    def reset_parameters(self) -> None:
        size = self.num_streams
        read = torch.zeros_like(self.read_and_mix[:, :1])
        read[self.turn] = 1
        init.copy_(self.read_and_mix, torch.cat([read, torch.eye(size).to(read)], dim=1))
        init.ones_(self.write)


class DynamicConnection(Connection):
    """Static weights plus small ones made from the normalised streams."""

    def __init__(self, hidden_size: int, num_streams: int, turn: int, eps: float, scale_start: float, tanh: bool):
        super().__init__(num_streams, turn)
        self.eps, self.scale_start, self.tanh = eps, scale_start, tanh
        self.gain = nn.Parameter(torch.empty(hidden_size))
        self.to_read_and_mix = nn.Parameter(torch.empty(hidden_size, 1 + num_streams))
        self.to_write = nn.Parameter(torch.empty(hidden_size, 1))
        self.read_scale = nn.Parameter(torch.empty(1))
        self.write_scale = nn.Parameter(torch.empty(1))

    def values(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        rows = (torch.cat([self.to_read_and_mix, self.to_write], dim=1).T * self.gain).to(streams.dtype)
        dynamic = F.linear(streams, rows).to(at_least_float32(streams.dtype))  # [B, T, n, 2 + n]
        dynamic = dynamic * inverse_rms(streams, self.eps)
        dynamic = dynamic.tanh() if self.tanh else dynamic
        read_and_mix = self.read_scale * dynamic[..., :-1] + self.read_and_mix
        return read_and_mix, self.write_scale * dynamic[..., -1] + self.write

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.ones_(self.gain)
        init.zeros_(self.to_read_and_mix)
        init.zeros_(self.to_write)
        init.constant_(self.read_scale, self.scale_start)
        init.constant_(self.write_scale, self.scale_start)
