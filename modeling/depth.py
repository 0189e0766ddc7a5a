"""Residuals move information along the depth axis, between sublayers. The base class is the plain Transformer.

The stream is what flows between sublayers: a flat tuple of tensors whose first element is always [B, T, D] (the
running state, or how a block reads it), and whose other elements are whatever a variant keeps besides (a wide state,
earlier states, oldest first). It is opened on the embeddings, read and written by every sublayer, and closed before
the final norm:

    stream = residual.open(embeddings)
    for each sublayer:
        read, stream = residual.read(stream)             Compress
        context = norm(read, residual.gain())
        update = sublayer(context)                       Process
        stream = residual.write(stream, update, read, context)    Rewrite
    hidden_states = residual.close(stream)

Rules that keep every variant working with torch.compile, activation checkpointing, sharding, offloading and PEFT:
nothing is changed in place; the stream stays flat and positional; a residual owns no parameter directly, only
submodules that it calls; and it keeps no reference to a module that somebody else owns. What a block's sublayers share
is owned by the block's attention residual and handed to `read` and `write` as `block`; what all layers share is owned
by the model's residual and handed over as `model`.
"""

from typing import Any, Literal

from torch import Tensor, nn

Site = Literal["local", "attn", "mlp", "model"]
Stream = tuple[Tensor, ...]
IN_RESIDUALS = ("residual", "attn_residual", "mlp_residual")  # the modules that hold all parameters of a residual


class Residual(nn.Module):
    """Standard residual (He et al., 2016): x + f(norm(x)).

    Also the interface of its variants: override what differs. One instance per sublayer (site "local", "attn" or
    "mlp", which `read` and `write`) and one per model (site "model" of layer `num_hidden_layers`, which `open` and
    `close`). The local sublayer reads and adds to the running state, whatever the variant: its update is part of the
    newest state where states are read, and of attention's output where outputs are. Options are the keyword-only
    arguments of the constructor; `check` refuses bad values.
    """

    keep_in_float32: tuple[str, ...] = ()  # modules whose parameters stay float32 in a half-precision model
    dormant: tuple[str, ...] = ()  # patterns of parameters without gradient at the first step of the identity form
    bitwise = True  # whether the identity form starts as the plain Transformer bit for bit

    def __init__(self, config, layer_idx: int, site: Site):
        super().__init__()
        self.layer_idx, self.site = layer_idx, site

    @classmethod
    def check(cls, config, **options: Any) -> None:
        """Raise ValueError, naming cause and remedy, for option values that make no sense."""

    @classmethod
    def cache_slots(cls, config, layer_idx: int, **options: Any) -> int:
        """How many `LeftContext`s this variant keeps in the cache of layer `layer_idx`."""
        return 0

    @classmethod
    def idle(cls, config, **options: Any) -> tuple[str, ...]:
        """Patterns of parameters that never have a gradient (but for rounding): they cannot change the output."""
        return ()

    def open(self, embeddings: Tensor, **tokens: Any) -> Stream:
        """[B, T, D] -> stream"""
        return (embeddings,)

    def read(self, stream: Stream, **tokens: Any) -> tuple[Tensor, Stream]:
        """The un-normalised input of this sublayer, and the stream that it leaves behind.

        The input is [B, T, D], or [3, B, T, D] when attention is to get its queries, keys and values from different
        places. `tokens` holds `cache`, `token_mask`, `position_ids`, `seq_idx`, `block` and `model`.
        """
        return stream[0], stream

    def gain(self) -> Tensor | None:
        """A gain of the sublayer's norm on top of its own, [3, 1, 1, D] for queries, keys and values, or none."""
        return None

    def write(self, stream: Stream, update: Tensor, read: Tensor, context: Tensor, **tokens: Any) -> Stream:
        """The stream after the sublayer turned its normalised input `context` into `update`, both [B, T, D]."""
        state, *rest = stream
        return (state + update, *rest)

    def close(self, stream: Stream, **tokens: Any) -> Tensor:
        """stream -> [B, T, D], the input of the final norm"""
        return self.read(stream, **tokens)[0]
