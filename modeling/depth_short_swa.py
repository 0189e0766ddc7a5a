"""ShortSWA on the depth axis: each block reads the last `window` block states of the same token.

Source: Residual Stream Duality (arXiv 2603.16039), section 2.2. With h_l the state that enters block l,

    q = W_Q n(h_l)    k_j = W_K n(h_j)    v_j = W_V n(h_j)        j = l - K + 1 ... l
    h_l <- h_l + W_O sum_j softmax_j(q.k_j / sqrt(d)) v_j

The paper fixes the read; W_O, the optional norm n and the place of the sum are our choice. Sharing the weights over
depth is the literal form: sequence attention shares its weights over positions. The twin of the sequence-axis
placement.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from .depth import Residual, Site, Stream
from .depth_sources import DepthWeights, inverse_rms
from .short_swa import ShortSWA


class DepthShortSWA(Residual):
    """Depth-wise ShortSWA (arXiv 2603.16039): attention over the last few block states of the same token.

    form: "paper" (all projections random) or "identity" (zero output projection, for pretrained models).
    window: K, block states that a block sees, its own included; None for all of them.
    share_weights: one set of projections for all blocks (the literal form), or one per block.
    num_heads, head_dim: of the depth attention; head_dim None for that of global attention.
    norm: RMSNorm of the states before the projections, without a gain, which they absorb.
    """

    dormant = (r"residual\.mixture\.swa\.(query|key|value)\.",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        window: int | None = 4,
        share_weights: bool = True,
        num_heads: int = 1,
        head_dim: int | None = None,
        norm: bool = True,
    ):
        super().__init__(config, layer_idx, site)
        self.window = config.num_hidden_layers if window is None else window
        self.share_weights = share_weights
        self.reads_depth = site == "attn"  # once per block, after the local sublayer
        if site == ("model" if share_weights else "attn"):
            depth_read = SharedDepthRead if share_weights else LayerDepthRead
            self.mixture = depth_read(
                config, num_heads, head_dim or config.head_dim, self.window, norm, form == "identity"
            )

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if options["window"] is not None and options["window"] < 1:
            raise ValueError(
                "Depth-wise ShortSWA reads at least its own state, so window must be 1 or more, got "
                f"{options['window']}; null reads all earlier blocks."
            )
        if options["num_heads"] < 1 or (options["head_dim"] is not None and options["head_dim"] < 1):
            raise ValueError("Depth-wise ShortSWA needs positive num_heads and head_dim.")
        if max(options["num_heads"], options["head_dim"] or 0) > 2**16:
            raise ValueError("Depth-wise ShortSWA's num_heads and head_dim must not exceed 65,536.")

    @classmethod
    def idle(cls, config, **options: Any) -> tuple[str, ...]:
        if options["window"] == 1 or config.num_hidden_layers == 1:
            return (r"residual\.mixture\.swa\.(query|key)\.",)  # a softmax over one state is a constant
        return () if options["share_weights"] else (r"layers\.0\.attn_residual\.mixture\.swa\.(query|key)\.",)

    def read(self, stream: Stream, model=None, **tokens: Any) -> tuple[Tensor, Stream]:
        if not self.reads_depth:
            return stream[0], stream
        state, *history = stream
        update, *history = (model if self.share_weights else self).mixture(state, *history)
        state = state + update.to(state.device)
        return state, (state, *history)


class DepthRead(nn.Module):
    """The newest of several states of a token reads them all. No state is normalised itself: see depth_sources."""

    def __init__(self, config, num_heads: int, head_dim: int, window: int, norm: bool, zero_output: bool):
        super().__init__()
        self.window, self.eps = window, config.rms_norm_eps if norm else None
        self.swa = ShortSWA(config.hidden_size, num_heads, num_heads, head_dim, window, zero_output)
        self.weights = DepthWeights()

    def scale(self, state: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, 1], what the norm multiplies a state by"""
        return torch.ones_like(state[..., :1]) if self.eps is None else inverse_rms(state, self.eps)

    def attend(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Projections of width H d, [B, T, H d] each, oldest first -> [B, T, D]"""
        key, value = torch.stack(keys, dim=-2), torch.stack(values, dim=-2)
        return self.swa.attend(query.unsqueeze(-2), key, value, self.record).squeeze(-2)

    def record(self, weights: Tensor) -> None:
        """[B, T, H, K] -> recorded as [H, K, B, T]"""
        self.weights(weights.movedim((-2, -1), (0, 1)))


class LayerDepthRead(DepthRead):
    """Projections of one block: it keeps the states, and what their norm multiplies them by."""

    def forward(self, state: Tensor, *history: Tensor) -> tuple[Tensor, ...]:
        """The newest state, earlier states and their scales -> the read [B, T, D], states, scales"""
        count = len(history) // 2
        states = [*history[:count], state][-self.window :]
        scales = [*history[count:], self.scale(state)][-self.window :]
        pairs = list(zip(states, scales, strict=True))
        query = (self.swa.query(state) * scales[-1]).to(state.dtype)
        keys = [(self.swa.key(x) * scale).to(x.dtype) for x, scale in pairs]
        values = [(self.swa.value(x) * scale).to(x.dtype) for x, scale in pairs]
        return self.attend(query, keys, values), *states, *scales


class SharedDepthRead(DepthRead):
    """Projections shared by all blocks: it keeps the keys and values, made once per state."""

    def forward(self, state: Tensor, *history: Tensor) -> tuple[Tensor, ...]:
        """The newest state, earlier keys and values -> the read [B, T, D], keys, values"""
        count, scale = len(history) // 2, self.scale(state)
        query, key, value = (
            (project(state) * scale).to(state.dtype) for project in (self.swa.query, self.swa.key, self.swa.value)
        )
        keys = [*history[:count], key][-self.window :]
        values = [*history[count:], value][-self.window :]
        return self.attend(query, keys, values), *keys, *values
