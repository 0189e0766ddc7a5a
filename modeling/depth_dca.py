"""DeepCrossAttention: queries, keys and values each read their own input-dependent sum of block outputs.

Source: Heddes et al., arXiv 2502.06785, sections 3 and 4. A generalised residual network (GRN) over the outputs f_j,

    v1:  g = sum_j b_j f_j                     b_j a number
    v2:  g = sum_j b_j * f_j                   b_j in R^D
    v3:  g = sum_j (b_j + act(w.f_j)) * f_j    w in R^D: what a source counts for depends on it

Three of them make the inputs of queries, keys and values, one more that of the final norm. b = 1 and w = 0 at first:
the plain sum, so both forms are the same operator. With the paper's ReLU and that start w never receives a gradient
(the slope of ReLU at 0 is 0), hence GELU by default.

A window k keeps the embeddings, the sum of the middle and the last k outputs (section 3.3, k-DCA).
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .depth import Site
from .depth_increments import BlockIncrements
from .depth_sources import DepthWeights, inverse_rms, weighted_sum
from .layers import QKVGains, at_least_float32

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}


class DeepCrossAttention(BlockIncrements):
    """DeepCrossAttention (arXiv 2502.06785): separate input-dependent sums of block outputs for q, k and v.

    form: both start as the plain Transformer.
    grn: "v1" (a number per source), "v2" (a number per source and feature), "v3" (v2 plus an input-dependent number).
    window: k, the newest block outputs kept apart from the sum of the others; None for all.
    activation: of v3; the paper's "relu" never learns from the start that the paper prescribes.
    split_qkv: one sum each for queries, keys and values, with norm gains of their own, or one for all.
    key_norm: RMSNorm, with a gain, of the sources before w (not in the paper).
    """

    dormant = (r"residual\.mixture\.norm$",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        grn: Literal["v1", "v2", "v3"] = "v3",
        window: int | None = None,
        activation: Literal["gelu", "relu", "silu"] = "gelu",
        split_qkv: bool = True,
        key_norm: bool = False,
    ):
        super().__init__(config, layer_idx, site)
        self.window = window
        num_sources = layer_idx + 1 if window is None else min(layer_idx + 1, window + 2)
        outputs = 3 if split_qkv and site == "attn" else 1
        if site in ("attn", "model"):
            eps = config.rms_norm_eps if key_norm else None
            self.mixture = GRN(config.hidden_size, num_sources, outputs, grn, activation, eps)
        self.gains = QKVGains(config.hidden_size) if outputs == 3 else None

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if options["window"] is not None and options["window"] < 1:
            raise ValueError(
                f"DeepCrossAttention keeps at least the last output, so window must be 1 or more, got "
                f"{options['window']}; null keeps all."
            )
        if options["form"] == "identity" and options["grn"] == "v3" and options["activation"] == "relu":
            raise ValueError(
                "With activation=relu the input-dependent weights of DeepCrossAttention get no gradient from their "
                "zero start, ever; use activation=gelu, or grn=v2."
            )

    def gain(self) -> Tensor | None:
        return None if self.gains is None else self.gains()

    def keep(self, sources: list[Tensor]) -> list[Tensor]:
        if self.window is None or len(sources) <= self.window + 2:
            return sources
        embeddings, middle, leaving, *last = sources
        return [embeddings, middle + leaving, *last]


class GRN(nn.Module):
    """O sums over n sources: sum_j (b_oj + act(w_o.f_j)) * f_j, centred on their plain sum."""

    def __init__(
        self,
        hidden_size: int,
        num_sources: int,
        num_outputs: int,
        version: str,
        activation: str,
        key_norm_eps: float | None,
    ):
        super().__init__()
        self.eps, self.activation = key_norm_eps, ACTIVATIONS[activation]
        self.b = nn.Parameter(torch.empty(num_outputs, num_sources, 1 if version == "v1" else hidden_size))
        self.w = nn.Parameter(torch.empty(num_outputs, hidden_size)) if version == "v3" else None
        self.norm = nn.Parameter(torch.empty(hidden_size)) if version == "v3" and key_norm_eps is not None else None
        self.weights = DepthWeights()

    def forward(self, running: Tensor, *sources: Tensor) -> Tensor:
        """The plain sum and n sources, all [B, T, D], oldest first -> [B, T, D], or [O, B, T, D] for O > 1"""
        static = self.b - 1  # [O, n, D or 1]
        mean = self.b.mean(-1)[..., None, None]
        if self.w is None:
            self.weights(mean)
            outputs = [weighted_sum(running, rows.unbind(0), sources) for rows in static.unbind(0)]
        else:
            dynamic = torch.stack([self.dynamic(source) for source in sources], dim=-1)  # [B, T, O, n]
            self.weights(mean + dynamic.permute(2, 3, 0, 1))
            outputs = [
                weighted_sum(
                    weighted_sum(running, rows.unbind(0), sources), dynamic[:, :, o, :, None].unbind(-2), sources
                )
                for o, rows in enumerate(static.unbind(0))
            ]
        return outputs[0] if len(outputs) == 1 else torch.stack(outputs)

    def dynamic(self, source: Tensor) -> Tensor:
        """act(w.f) for every output: [B, T, D] -> [B, T, O]"""
        w = self.w if self.norm is None else self.w * self.norm
        logits = (source @ w.to(source.dtype).T).to(at_least_float32(source.dtype))
        return self.activation(logits if self.norm is None else logits * inverse_rms(source, self.eps))

    def reset_parameters(self) -> None:
        init.ones_(self.b)
        if self.w is not None:
            init.zeros_(self.w)
        if self.norm is not None:
            init.ones_(self.norm)
