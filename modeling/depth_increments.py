"""Residuals whose blocks read a mixture of the increments of earlier blocks, rather than their sum.

The increment of a block is what its sublayers add: f_0 the embeddings, f_i = attention + MLP. Their plain sum is the
running state r, which is carried along for the identity form, local mixers and `output_hidden_states`. Block i reads
g, a mixture of f_0 ... f_{i-1}; its MLP reads g + attention.

The stream is (r, f_0, f_1, ...) between blocks, (r, local update, f_0, ...) after a local sublayer, and
(g + attention, increment so far, r, f_0, ...) between attention and MLP.
"""

from typing import Any

from torch import Tensor

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .sequence import has_local_sublayer


class BlockIncrements(Residual):
    """The flow of increments; a variant brings the `mixture`, at the sites "attn" and "model", and what it keeps.

    A mixture takes (r, f_0, f_1, ...) and returns [B, T, D] or, for separate queries, keys and values, [3, B, T, D].
    """

    keep_in_float32 = IN_RESIDUALS
    reads_running_state = True  # otherwise a local update, which is no source yet, is added to the mixture

    def __init__(self, config, layer_idx: int, site: Site):
        super().__init__(config, layer_idx, site)
        self.after_local = site == "attn" and has_local_sublayer(config, layer_idx)

    def open(self, embeddings: Tensor, **tokens: Any) -> Stream:
        return (embeddings, embeddings)

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        if self.site not in ("attn", "model"):
            return stream[0], stream
        running, *sources = stream
        local = [sources.pop(0)] if self.after_local else []
        mixed = self.mixture(running, *sources)
        if local and not self.reads_running_state:
            mixed = mixed + local[0]
        return mixed, stream

    def write(self, stream: Stream, update: Tensor, read: Tensor, context: Tensor, **tokens: Any) -> Stream:
        if self.site == "mlp":
            _, increment, running, *sources = stream
            return (running + update, *self.keep([*sources, self.increment(increment + update)]))
        running, *sources = stream
        if self.site == "local":
            return (running + update, update, *sources)
        increment = sources.pop(0) + update if self.after_local else update
        return (self.mlp_input(read, update), increment, running + update, *sources)

    def mlp_input(self, read: Tensor, attention: Tensor) -> Tensor:
        """What the MLP reads: the query stream, where there are several, carries the residual."""
        return (read if read.dim() == 3 else read[0]) + attention

    def increment(self, increment: Tensor) -> Tensor:
        """A finished increment, as later blocks will read it."""
        return increment

    def keep(self, sources: list[Tensor]) -> list[Tensor]:
        """The sources that later blocks will read."""
        return sources
