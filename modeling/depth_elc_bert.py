"""ELC-BERT: every layer counts, by a static convex combination of block outputs instead of a residual sum.

Source: Georges Gabriel Charpentier and Samuel, arXiv 2311.02265, section 3, and the four model classes of its code.
With o_0 the embeddings and o_n the output of block n without a skip around it,

    paper:      g_n = sum_i softmax(s_n)_i o_i                 block n reads g_n instead of a running sum
    identity:   g_n = r + sum_i (n softmax(s_n)_i - 1) o_i     our extension: exactly the running sum r at first

The convex combination has n times smaller weights than the sum, and the sublayers add to it, so the paper form is the
plain Transformer for no logits at all.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .depth import Site
from .depth_increments import BlockIncrements
from .depth_sources import DepthWeights, centred_softmax, weighted_sum


class ELCBert(BlockIncrements):
    """ELC-BERT (arXiv 2311.02265): blocks read a learned, static convex combination of all earlier block outputs.

    form: "paper" (convex combination) or "identity" (n times it, centred on the running sum, for pretrained models).
    start: logits of a combination: "uniform" (zeros) or "last" (1 for the newest output, the paper's base model).
    mlp_reads: "sum" (g + attention) or "attention" alone, as in the paper's base model.
    normalize: LayerNorm without parameters on every block output (the paper's "normalized").
    final_read: a last combination before the final norm (the paper's "weighted output"); otherwise the last output.
    """

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        start: Literal["uniform", "last"] = "uniform",
        mlp_reads: Literal["sum", "attention"] = "sum",
        normalize: bool = False,
        final_read: bool = True,
    ):
        super().__init__(config, layer_idx, site)
        self.reads_running_state = form == "identity"
        self.mlp_reads_sum, self.normalize = mlp_reads == "sum", normalize
        self.eps = config.rms_norm_eps
        if site == "attn" or (site == "model" and final_read):
            self.mixture = ConvexMixture(layer_idx + 1, start == "last", form == "identity")
        elif site == "model":
            self.mixture = LastOutput()

    @classmethod
    def check(cls, config, **options: Any) -> None:
        exact = {"start": "uniform", "mlp_reads": "sum", "normalize": False, "final_read": True}
        for name, value in exact.items():
            if options["form"] == "identity" and options[name] != value:
                raise ValueError(
                    f"ELC-BERT's identity form needs {name}={value}, got {options[name]}: nothing else starts as the "
                    "plain Transformer. Use form=paper for it."
                )

    def mlp_input(self, read: Tensor, attention: Tensor) -> Tensor:
        return super().mlp_input(read, attention) if self.mlp_reads_sum else attention

    def increment(self, increment: Tensor) -> Tensor:
        return F.layer_norm(increment, increment.shape[-1:], eps=self.eps) if self.normalize else increment


class ConvexMixture(nn.Module):
    """sum_i softmax(s)_i o_i, or that times n with the running sum as its centre."""

    def __init__(self, num_sources: int, favour_last: bool, centred: bool):
        super().__init__()
        self.favour_last, self.centred = favour_last, centred
        if num_sources > 1:  # a softmax of one number is 1
            self.score = nn.Parameter(torch.empty(num_sources))
        self.weights = DepthWeights()

    def forward(self, running: Tensor, *sources: Tensor) -> Tensor:
        """The running sum and n outputs, all [B, T, D], oldest first -> [B, T, D]"""
        if len(sources) == 1:
            return running if self.centred else sources[0]
        shares = self.weights(self.score.softmax(0).view(1, -1, 1, 1))
        if not self.centred:
            return weighted_sum(None, shares[0].unbind(0), sources)
        return weighted_sum(running, centred_softmax(self.score).unbind(0), sources)

    def reset_parameters(self) -> None:
        if hasattr(self, "score"):
            start = torch.zeros_like(self.score)
            start[-1] = float(self.favour_last)
            init.copy_(self.score, start)


class LastOutput(nn.Module):
    """The newest output, for models without a last combination."""

    def forward(self, running: Tensor, *sources: Tensor) -> Tensor:
        return sources[-1]
