"""DenseFormer: depth-weighted averages of block outputs.

Source: Pagliardini et al., arXiv 2402.02622, section 3. With X_0 the embeddings and X_i = B_i(Y_{i-1}),

    Y_i = sum_j alpha_ij X_j    over j <= i with j = i mod dilation,    where i > 0 is a multiple of the period
    Y_i = X_i                                                           elsewhere

The weights are scalars, shared by all tokens, and start one-hot: the plain Transformer.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, weighted_sum


class DenseFormer(Residual):
    """DenseFormer (arXiv 2402.02622): blocks read a learned, static average of all earlier block outputs.

    form: both start as the plain Transformer.
    dilation: k, the distance between the blocks that are averaged.
    period: p, an average every so many blocks. The paper recommends 4 x 5 for speed; k = p mixes one residue only.
    """

    keep_in_float32 = IN_RESIDUALS

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        dilation: int = 1,
        period: int = 1,
    ):
        super().__init__(config, layer_idx, site)
        num_layers = config.num_hidden_layers
        self.averaged = averaged(layer_idx, dilation, period) if site in ("attn", "model") else ()
        self.kept_before = kept(layer_idx, num_layers, dilation, period)
        self.kept_after = kept(layer_idx + 1, num_layers, dilation, period)
        if self.averaged:
            self.mixture = StaticMixture(len(self.averaged))

    @classmethod
    def check(cls, config, **options: Any) -> None:
        for name in ("dilation", "period"):
            if options[name] < 1:
                raise ValueError(f"DenseFormer needs {name} >= 1, got {options[name]}; 1 averages everything.")
            if options[name] > config.num_hidden_layers:
                raise ValueError(
                    f"DenseFormer's {name} is {options[name]}, but the model has only {config.num_hidden_layers} "
                    f"blocks: lower {name}."
                )

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        if self.site not in ("attn", "model"):
            return stream[0], stream
        state, *history = stream
        outputs = {**dict(zip(self.kept_before, history, strict=True)), self.layer_idx: state}
        if self.averaged:
            state = self.mixture(*(outputs[block] for block in self.averaged))
        return state, (state, *(outputs[block] for block in self.kept_after))


def averaged(index: int, dilation: int, period: int) -> tuple[int, ...]:
    """The blocks j whose outputs X_j make up Y_index, oldest first; none where Y_index = X_index."""
    if index == 0 or index % period:
        return ()
    return tuple(range(index % dilation, index + 1, dilation))


def kept(index: int, num_layers: int, dilation: int, period: int) -> tuple[int, ...]:
    """The blocks before `index` whose outputs are averaged at `index` or later."""
    later = range(index, num_layers + 1)
    return tuple(j for j in range(index) if any(j in averaged(i, dilation, period) for i in later))


class StaticMixture(nn.Module):
    """sum_j alpha_j X_j, one-hot on the newest at first."""

    def __init__(self, num_sources: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(num_sources))
        self.weights = DepthWeights()

    def forward(self, *sources: Tensor) -> Tensor:
        """n times [B, T, D], oldest first -> [B, T, D]"""
        alpha = self.weights(self.alpha.view(1, -1, 1, 1))[0]
        deviations = [*alpha[:-1].unbind(0), alpha[-1] - 1]
        return weighted_sum(sources[-1], deviations, sources)

    def reset_parameters(self) -> None:
        start = torch.zeros_like(self.alpha)
        start[-1] = 1
        init.copy_(self.alpha, start)
