"""Attention Residuals: every sublayer attends over the outputs of all earlier sublayers, or over their block sums.

Source: Kimi Team, arXiv 2603.15031, sections 3 and 4, and "Delta Attention Residuals", arXiv 2605.18855; several
heads: "Multi-Head Attention Residuals", arXiv 2607.27230. With v_0 the embeddings and v_l the output of sublayer l,

    s_i = w.RMSNorm(v_i)        a = softmax_i(s)        w in R^D a learned query per read, zero at first

    paper:            h = sum_i a_i v_i                         identity:  h = r + sum_i (n a_i - 1) v_i
    paper, delta:     h = r + sum_i a_i v_i                     identity:  h = r + sum_i (a_i - 1/n) v_i

where r is the plain sum of all v and n the number of sources. The identity forms are our extension: exactly r for a
zero query. The paper form then reads the mean r / n, which an RMSNorm undoes but for its eps (RMSNorm(r/n; eps) =
RMSNorm(r; n^2 eps)): close to the plain Transformer, never equal to it. The first sublayer reads the embeddings.
Attention Residuals have one more read before the final norm, the delta form has none.

Blocks: the sources are v_0, the sums of completed blocks of sublayers, and the sum so far of the running one, for both
papers' forms (the delta paper's code differs in its blocks).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights, centred_softmax, inverse_rms, weighted_sum
from .layers import at_least_float32
from .sequence import has_local_sublayer

USUAL_BLOCKS = 8


class AttentionResiduals(Residual):
    """Attention Residuals (arXiv 2603.15031): sublayers attend over earlier sublayer outputs or their block sums.

    form: "paper" (the softmax average) or "identity" (n times it, centred on the running sum, for pretrained models).
    block_size: sublayers per block (two per layer), 1 for full attention over depth, None for about 8 blocks.
    num_heads: slices of the features with a softmax each.
    key_norm: RMSNorm, with a gain, of the sources before the query.
    final_read: a last read before the final norm, which otherwise takes the running sum; None for what is published.
    """

    keep_in_float32 = IN_RESIDUALS
    dormant = (r"residual\.mixture\.gain$",)
    adds = False  # delta: the average comes on top of the running sum
    published_final_read = True

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        block_size: int | None = None,
        num_heads: int = 1,
        key_norm: bool = True,
        final_read: bool | None = None,
    ):
        super().__init__(config, layer_idx, site)
        num_sublayers = 2 * config.num_hidden_layers
        self.block_size = block_size or -(-num_sublayers // USUAL_BLOCKS // 2) * 2
        self.num_heads, self.eps = num_heads, config.rms_norm_eps if key_norm else None
        self.index = 2 * layer_idx + (site == "mlp")  # sublayers before this one
        self.after_local = site == "attn" and has_local_sublayer(config, layer_idx)
        final_read = self.published_final_read if final_read is None else final_read
        self.mixture = None
        if (site in ("attn", "mlp") and self.index > 0) or (site == "model" and final_read):
            self.mixture = SourceAttention(config.hidden_size, num_heads, key_norm, form == "identity", self.adds)

    @classmethod
    def check(cls, config, **options: Any) -> None:
        num_sublayers, size, heads = 2 * config.num_hidden_layers, options["block_size"], options["num_heads"]
        if size is not None and size != 1 and (size % 2 or not 1 <= size <= num_sublayers):
            raise ValueError(
                f"Attention Residuals need an even block_size of at most {num_sublayers} sublayers (two per layer), "
                f"or 1 for full attention over depth, got {size}; null makes about {USUAL_BLOCKS} blocks."
            )
        if heads < 1 or config.hidden_size % heads:
            raise ValueError(
                f"Attention Residuals split the features into heads, so num_heads must divide hidden_size="
                f"{config.hidden_size}, got {heads}."
            )

    def open(self, embeddings: Tensor, **tokens: Any) -> Stream:
        return (embeddings, embeddings, *self.scale(embeddings))

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        if self.mixture is None:
            return stream[0], stream
        running, *entries = stream
        local = [entries.pop(0)] if self.after_local else []
        mixed = self.mixture(running, *entries)
        if local and not self.mixture.reads_running_state:
            mixed = mixed + local[0]  # which is no source yet
        return mixed, stream

    def write(self, stream: Stream, update: Tensor, read: Tensor, context: Tensor, **tokens: Any) -> Stream:
        running, *entries = stream
        if self.site == "local":  # counts into attention's output
            return (running + update, update, *entries)
        value = entries.pop(0) + update if self.after_local else update
        if self.index % self.block_size:  # the running block goes on
            if self.eps is not None:
                entries.pop()  # of a sum that is about to change
            value = entries.pop() + value
        return (running + update, *entries, value, *self.scale(value))

    def scale(self, value: Tensor) -> tuple[Tensor, ...]:
        """What a source carries besides itself: its inverse RMS [B, T, H], once for all reads."""
        return () if self.eps is None else (inverse_rms(value, self.eps, self.num_heads),)


class DeltaAttentionResiduals(AttentionResiduals):
    """Delta Attention Residuals (arXiv 2605.18855): the average of earlier outputs on top of the running sum.

    form: "paper" (running sum plus average) or "identity" (plus the centred average, for pretrained models).
    block_size, num_heads, key_norm: as in Attention Residuals.
    final_read: a last read before the final norm, which otherwise takes the running sum; None for what is published.
    """

    adds = True
    published_final_read = False


class SourceAttention(nn.Module):
    """One read: a learned query over the normalised sources, head by head."""

    def __init__(self, hidden_size: int, num_heads: int, key_norm: bool, centred: bool, adds: bool):
        super().__init__()
        self.num_heads, self.key_norm, self.centred, self.adds = num_heads, key_norm, centred, adds
        self.reads_running_state = centred or adds
        self.query = nn.Parameter(torch.empty(hidden_size))
        self.gain = nn.Parameter(torch.empty(hidden_size)) if key_norm else None
        self.weights = DepthWeights()

    def forward(self, running: Tensor, *entries: Tensor) -> Tensor:
        """r and n sources [B, T, D], oldest first, each followed by its inverse RMS [B, T, H] -> [B, T, D]"""
        step = 2 if self.key_norm else 1
        sources, scales = entries[::step], entries[1::step] if self.key_norm else ()
        logits = self.logits(sources, scales)  # [n, B, T, H]
        shares = logits.softmax(0)
        self.weights(shares.permute(3, 0, 1, 2))
        if self.centred:
            shares = centred_softmax(logits)
            shares = shares / len(sources) if self.adds else shares
        base = running.unflatten(-1, (self.num_heads, -1)) if self.reads_running_state else None
        sources = [source.unflatten(-1, (self.num_heads, -1)) for source in sources]
        return weighted_sum(base, shares.unsqueeze(-1).unbind(0), sources).flatten(-2)

    def logits(self, sources: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> Tensor:
        """w.RMSNorm(v_i) = ((w * gain).v_i) / rms(v_i): [n, B, T, H], in float32 at least"""
        query = self.query if self.gain is None else self.query * self.gain
        heads = torch.eye(self.num_heads, dtype=query.dtype, device=query.device).unsqueeze(1)
        query = (query.view(self.num_heads, -1, 1) * heads).flatten(0, 1)  # [D, H], a head's slice in its column
        query, dtype = query.to(sources[0].dtype), at_least_float32(sources[0].dtype)
        dots = [(source @ query).to(dtype) for source in sources]
        return torch.stack([dot * scale for dot, scale in zip(dots, scales, strict=True)] if scales else dots)

    def reset_parameters(self) -> None:
        init.zeros_(self.query)
        if self.gain is not None:
            init.ones_(self.gain)
