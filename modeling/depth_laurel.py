"""LAuReL: learned augmented residual layers.

Source: Menghani et al., arXiv 2411.07501, section 2. A sublayer with output f and input x writes

    RW:  a f + b x          two scalars                             a = b = 1 at first
    LR:  f + x + B A x      a low-rank map of the skip              B = 0 at first
    PA:  f + x + sum_j c_j x_j              the last states, oldest first    c = 0 at first

or any sum of them: a f + b (x + B A x + sum_j c_j x_j). Both forms start as the plain Transformer. PA reads the
earlier states themselves, without the low-rank maps that the paper also offers for them.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, weighted_sum


class LAuReL(Residual):
    """LAuReL (arXiv 2411.07501): sublayer and skip with learned weights, a low-rank skip, and earlier states.

    form: both start as the plain Transformer.
    weighted: RW, a weight for the sublayer and one for the skip.
    rank: LR, of the low-rank map of the skip; 0 for none.
    previous: PA, how many earlier states are added; 0 for none.
    """

    keep_in_float32 = IN_RESIDUALS
    dormant = (r"_residual\.augment\.down$",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        weighted: bool = True,
        rank: int = 32,
        previous: int = 0,
    ):
        super().__init__(config, layer_idx, site)
        self.previous = previous
        if site in ("attn", "mlp"):
            earlier = min(previous, 2 * layer_idx + (site == "mlp"))
            self.augment = AugmentedSkip(config.hidden_size, weighted, rank, earlier, config.initializer_range)

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if not 0 <= options["rank"] <= config.hidden_size:
            raise ValueError(
                f"LAuReL needs a rank from 0 (none) to hidden_size={config.hidden_size}, got {options['rank']}."
            )
        if not 0 <= options["previous"] <= 2 * config.num_hidden_layers:
            raise ValueError(
                f"LAuReL needs previous from 0 (none) to {2 * config.num_hidden_layers} sublayers, got "
                f"{options['previous']}."
            )
        if not options["weighted"] and not options["rank"] and not options["previous"]:
            raise ValueError("LAuReL without weighted, rank and previous is the standard residual: use that.")

    def write(self, stream: Stream, update: Tensor, read: Tensor, context: Tensor, **tokens: Any) -> Stream:
        state, *history = stream
        if self.site == "local":
            return (state + update, *history)
        written = self.augment(update, state, *history)
        return (written, *[*history, state][-self.previous :]) if self.previous else (written,)


class AugmentedSkip(nn.Module):
    """a f + b (x + B A x + sum_j c_j x_j)"""

    def __init__(self, hidden_size: int, weighted: bool, rank: int, num_earlier: int, std: float):
        super().__init__()
        self.std = std
        self.sublayer_and_skip = nn.Parameter(torch.empty(2)) if weighted else None
        self.down = nn.Parameter(torch.empty(rank, hidden_size)) if rank else None
        self.up = nn.Parameter(torch.empty(hidden_size, rank)) if rank else None
        self.earlier = nn.Parameter(torch.empty(num_earlier)) if num_earlier else None
        self.weights = DepthWeights()

    def forward(self, update: Tensor, state: Tensor, *history: Tensor) -> Tensor:
        """f, x and earlier states, all [B, T, D], oldest first -> [B, T, D]"""
        skip = state
        if self.down is not None:
            skip = skip + (state @ self.down.to(state.dtype).T) @ self.up.to(state.dtype).T
        if self.earlier is not None:
            shares = self.weights(self.earlier.view(1, -1, 1, 1))
            skip = weighted_sum(skip, shares[0].unbind(0), history)
        if self.sublayer_and_skip is None:
            return skip + update
        # Centred, so that weights near one keep their digits in bfloat16.
        return weighted_sum(skip + update, (self.sublayer_and_skip - 1).unbind(0), (update, skip))

    def reset_parameters(self) -> None:
        if self.sublayer_and_skip is not None:
            init.ones_(self.sublayer_and_skip)
        if self.down is not None:
            init.normal_(self.down, std=self.std)
            init.zeros_(self.up)
        if self.earlier is not None:
            init.zeros_(self.earlier)
