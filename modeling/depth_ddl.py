r"""Deep Delta Learning (Zhang et al., arXiv 2601.00417): every sublayer rewrites one direction of the state.

The state of a token is X, d_v channels of width D. A sublayer with output f writes along k = f / sqrt(|f|^2 + eps^2):

    X' = X + b k (v - k.X)          b = 2 sigmoid(w.c + b0) in (0, 2), c = norm(read);  v in R^d_v       (section 2)

so at b = 1 the read-out k.X' is exactly v. Since k is f times a number, the write is f times one number per channel,
and that is how it is computed. With d_v > 1 every block compresses X to width D before its sublayers (CC mixes
channels, TC mixes channels and the last tokens), and a last compressor reads X before the final norm; EC opens X with
a causal convolution over the embeddings (appendix A). The wide state is laid out [B, T, d_v, D].

Two published ways to make v: "sigmoid", 4 sigmoid(W read + b), what the authors' code runs; "linear", W c + b, what
the paper's text says.

`form: identity` is our extension for pretrained models: v - k.X becomes v + carry |f| - erase k.X per sublayer, with
carry = 1 and erase = 0 at the start, where b = 1 and v = 0 exactly. Then X' = X + f bit for bit, and every new
parameter has a gradient (d_v > 1: the model reads channel 0 only, v is zero there and small on the others, which learn
as soon as the read opens up). At carry = 0, erase = 1 it is the published rule.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.generic import maybe_autocast

from .depth import IN_RESIDUALS, Residual, Site, Stream
from .depth_sources import DepthWeights
from .layers import ZeroLinear, at_least_float32
from .sequence import LeftContext, taps


class DeepDeltaLearning(Residual):
    """Deep Delta Learning (arXiv 2601.00417): a gated delta rule rewrites the state along each sublayer's output.

    form: "paper" (the published rule) or "identity" (starts as x + f, for pretrained models).
    value_channels: d_v, the channels of the state.
    compress: "channels" (CC) or "tokens" (TC), how d_v > 1 channels are read.
    expand: open d_v > 1 channels by a convolution over the embeddings (EC) rather than by repetition.
    kernel_size: taps of TC and EC.
    value: "sigmoid", "linear", or None for what the form implies (paper: sigmoid, identity: linear).
    k_eps: eps in k = f / sqrt(|f|^2 + eps^2).
    beta_init: gate b at the start, in (0, 2); 1 for the identity form.
    gate_hidden_size: width of a tanh layer inside the gate, or None for the single linear layer.
    """

    keep_in_float32 = IN_RESIDUALS
    dormant = (r"\.gate\.0\.",)

    def __init__(
        self,
        config,
        layer_idx: int,
        site: Site,
        *,
        form: Literal["paper", "identity"] = "paper",
        value_channels: int = 1,
        compress: Literal["channels", "tokens"] = "channels",
        expand: bool = False,
        kernel_size: int = 4,
        value: Literal["sigmoid", "linear"] | None = None,
        k_eps: float = 1e-5,
        beta_init: float = 1.0,
        gate_hidden_size: int | None = None,
    ):
        super().__init__(config, layer_idx, site)
        self.value_channels = value_channels
        hidden_size, wide = config.hidden_size, value_channels > 1
        if site in ("attn", "mlp"):
            rule = DeltaRule if form == "paper" else CarriedDeltaRule
            value = value or ("sigmoid" if form == "paper" else "linear")
            std = 0.5 * hidden_size**-0.5 if form == "paper" else config.initializer_range
            self.rewrite = rule(hidden_size, value_channels, value, k_eps, beta_init, gate_hidden_size, std)
        self.num_taps = kernel_size if wide and compress == "tokens" and site != "local" else 1
        if wide and site in ("attn", "model"):  # the block's compressor, or the last one
            taps_kept = kernel_size if compress == "tokens" else 1
            self.compress = Compressor(hidden_size, value_channels, taps_kept, one_hot=form == "identity")
        self.context = LeftContext(self.num_taps - 1, layer_idx=min(layer_idx, config.num_hidden_layers - 1))
        self.expand = None
        if wide and expand and site == "model":
            self.expand = TokenExpander(hidden_size, value_channels, kernel_size)
            self.embedding_context = LeftContext(kernel_size - 1, layer_idx=0)

    @classmethod
    def check(cls, config, **options: Any) -> None:
        form, channels = options["form"], options["value_channels"]
        if channels < 1:
            raise ValueError(f"DDL needs at least one value channel, got value_channels={channels}; 1 is the default.")
        if max(channels, options["kernel_size"], options["gate_hidden_size"] or 0) > 2**16:
            raise ValueError("DDL's value_channels, kernel_size and gate_hidden_size must not exceed 65,536.")
        if options["kernel_size"] < 2:
            raise ValueError(
                f"DDL's kernels need at least 2 taps, got kernel_size={options['kernel_size']}; 4 is usual."
            )
        if channels == 1 and (options["expand"] or options["compress"] == "tokens"):
            raise ValueError("DDL compresses and expands only wide states: set value_channels=4, or drop the option.")
        if not 0 < options["beta_init"] < 2:
            raise ValueError(
                f"DDL's gate lies between 0 and 2, got beta_init={options['beta_init']}; 1 is the default."
            )
        if not 1e-15 <= options["k_eps"] <= 1:
            raise ValueError(f"DDL needs k_eps from 1e-15 to 1, got {options['k_eps']}; 1e-5 is the default.")
        if options["gate_hidden_size"] is not None and options["gate_hidden_size"] < 1:
            raise ValueError("DDL's gate_hidden_size must be a positive width, or null for a gate of one layer.")
        if form == "identity" and options["value"] == "sigmoid":
            raise ValueError(
                "4 sigmoid(.) is never zero, so DDL cannot start as the identity with it: use value=linear."
            )
        if form == "identity" and options["beta_init"] != 1:
            raise ValueError("DDL's identity form needs beta_init=1, because x + f is written with gate 1.")

    @classmethod
    def cache_slots(cls, config, layer_idx: int, **options: Any) -> int:
        if options["value_channels"] == 1:
            return 0
        reads = 2 if options["compress"] == "tokens" else 0
        if options["compress"] == "tokens" and layer_idx == config.num_hidden_layers - 1:
            reads += 1  # the last compressor
        if options["expand"] and layer_idx == 0:
            reads += 1
        return reads

    def open(self, embeddings: Tensor, seq_idx: Tensor | None = None, **tokens: Any) -> Stream:
        if self.value_channels == 1:
            return (embeddings,)
        if self.expand is None:
            return (embeddings, embeddings.unsqueeze(-2).expand(-1, -1, self.value_channels, -1))
        return (embeddings, self.expand(self.embedding_context(embeddings, **tokens), seq_idx))

    def read(
        self, stream: Stream, block: Residual | None = None, seq_idx: Tensor | None = None, **tokens: Any
    ) -> tuple[Tensor, Stream]:
        if self.value_channels == 1 or (self.site == "mlp" and self.num_taps == 1):
            return stream[0], stream  # what attention's write has compressed already
        state = stream[1]
        states = self.context(state.flatten(-2), **tokens).unflatten(-1, state.shape[-2:])
        compress = self.compress if self.site == "model" else block.compress
        return compress(states, self.num_taps, seq_idx), stream

    def write(
        self,
        stream: Stream,
        update: Tensor,
        read: Tensor,
        context: Tensor,
        block: Residual | None = None,
        **tokens: Any,
    ) -> Stream:
        if self.site == "local":
            state, *wide = stream
            return (state + update, *(channels + update.unsqueeze(-2) for channels in wide))
        if self.value_channels == 1:
            return (self.rewrite(stream[0].unsqueeze(-2), update, read, context).squeeze(-2),)
        state = self.rewrite(stream[1], update, read, context)
        return (block.compress(state), state)


class DeltaRule(nn.Module):
    """X + b k (v - k.X), the published rule."""

    def __init__(self, hidden_size, value_channels, value, k_eps, beta_init, gate_hidden_size, std):
        super().__init__()
        self.k_eps = k_eps
        self.value_from_read = value == "sigmoid"
        self.gate, self.value = self.build(hidden_size, value_channels, beta_init, gate_hidden_size, std)
        self.weights = DepthWeights()

    def build(self, hidden_size, value_channels, beta_init, gate_hidden_size, std) -> tuple[nn.Module, nn.Module]:
        gate = GateLinear(gate_hidden_size or hidden_size, std, math.log(beta_init / (2 - beta_init)))
        return _with_hidden_layer(gate, hidden_size, gate_hidden_size), ValueLinear(hidden_size, value_channels, std)

    def forward(self, state: Tensor, update: Tensor, read: Tensor, context: Tensor) -> Tensor:
        """state [B, T, d_v, D], update, read and context [B, T, D] -> [B, T, d_v, D]"""
        update = update.to(at_least_float32(update.dtype))
        with maybe_autocast(update.device.type, enabled=False):  # gates need more digits than bfloat16 has
            gate = 2 * _call(self.gate, context).sigmoid()  # [B, T, 1]
            value = 4 * _call(self.value, read).sigmoid() if self.value_from_read else _call(self.value, context)
        scale = torch.rsqrt(update.square().sum(-1, keepdim=True) + self.k_eps**2)  # k = scale * update
        readout = scale * (state * update.unsqueeze(-2)).sum(-1)  # k.X: [B, T, d_v]
        written, erased = self.amounts(scale, value, readout)
        recorded = self.weights(torch.stack([gate.expand_as(written), gate * written, gate * erased]).movedim(-1, 1))
        amount = (recorded[1] - recorded[2]).movedim(0, -1)  # the write is amount * update
        return state + (amount.unsqueeze(-1) * update.unsqueeze(-2)).to(state.dtype)

    def amounts(self, scale: Tensor, value: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
        """What to write along k and what to erase, in units of the update, before the gate.

        [B, T, 1], [B, T, d_v], [B, T, d_v] -> [B, T, d_v] each
        """
        return scale * value, scale * readout


class CarriedDeltaRule(DeltaRule):
    """X + b (carry f + k (v - erase k.X)), x + f at the start."""

    def __init__(self, *args):
        super().__init__(*args)
        # One number each, as vectors: FSDP2 cannot cut up tensors without dimensions.
        self.carry = nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.erase = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def build(self, hidden_size, value_channels, beta_init, gate_hidden_size, std) -> tuple[nn.Module, nn.Module]:
        gate = ZeroLinear(gate_hidden_size or hidden_size, 1)  # 2 sigmoid(0) is exactly 1
        return _with_hidden_layer(gate, hidden_size, gate_hidden_size), UnreadValueLinear(
            hidden_size, value_channels, std
        )

    def amounts(self, scale: Tensor, value: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
        return self.carry + scale * value, scale * (self.erase * readout)

    def reset_parameters(self) -> None:
        init.ones_(self.carry)
        init.zeros_(self.erase)


class GateLinear(nn.Linear):
    """The last layer of the gate: its bias sets the gate at the start."""

    def __init__(self, in_features: int, std: float, logit: float):
        self.std, self.logit = std, logit
        super().__init__(in_features, 1)

    def reset_parameters(self) -> None:
        init.normal_(self.weight, std=self.std)
        init.constant_(self.bias, self.logit)


class ValueLinear(nn.Linear):
    """The target v, one row per channel, started as in the authors' code."""

    def __init__(self, in_features: int, out_features: int, std: float):
        self.std = std
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        init.normal_(self.weight, std=self.std)
        bound = self.in_features**-0.5
        init.uniform_(self.bias, -bound, bound)


class UnreadValueLinear(ValueLinear):
    """The target v, zero on channel 0, which the model reads, and small on the others, so that they differ."""

    def reset_parameters(self) -> None:
        rows = torch.randn_like(self.weight) * self.std
        rows[0] = 0
        init.copy_(self.weight, rows)  # whole tensors only: a slice would forget that its parameter was loaded
        init.zeros_(self.bias)


class Compressor(nn.Module):
    """Reads the state: every feature mixes its channels (CC: one tap), and over the last tokens (TC), sum w_sij X_ij(t
    - s).

    The kernel and the read vector of the paper are folded into w.
    """

    def __init__(self, hidden_size: int, value_channels: int, kernel_size: int, one_hot: bool):
        super().__init__()
        self.one_hot = one_hot
        self.weight = nn.Parameter(torch.empty(kernel_size, value_channels, hidden_size))  # the last tap is now

    def forward(self, states: Tensor, num_taps: int = 1, seq_idx: Tensor | None = None) -> Tensor:
        """[B, num_taps - 1 + T, d_v, D] -> [B, T, D], by the last `num_taps` taps"""
        weights = self.weight[-num_taps:].unbind(0)
        pairs = zip(taps(states, num_taps, seq_idx), weights, strict=True)
        return sum((state * weight).sum(-2) for state, weight in pairs).to(states.dtype)

    def reset_parameters(self) -> None:
        weights = torch.full_like(self.weight[-1], 0.0 if self.one_hot else 1 / self.weight.shape[1])
        if self.one_hot:  # channel 0 alone
            weights[0] = 1
        init.copy_(self.weight, _on_last_tap(self.weight, weights))


class TokenExpander(nn.Module):
    """EC: every channel starts as a causal convolution of the embeddings over tokens, at first their repetition."""

    def __init__(self, hidden_size: int, value_channels: int, kernel_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kernel_size, value_channels, hidden_size))

    def forward(self, embeddings: Tensor, seq_idx: Tensor | None) -> Tensor:
        """[B, kernel_size - 1 + T, D] -> [B, T, d_v, D]"""
        pairs = zip(taps(embeddings, len(self.weight), seq_idx), self.weight.unbind(0), strict=True)
        return sum(embedding.unsqueeze(-2) * weight for embedding, weight in pairs).to(embeddings.dtype)

    def reset_parameters(self) -> None:
        init.copy_(self.weight, _on_last_tap(self.weight, torch.ones_like(self.weight[-1])))


def _with_hidden_layer(gate: nn.Linear, hidden_size: int, gate_hidden_size: int | None) -> nn.Module:
    if gate_hidden_size is None:
        return gate
    return nn.Sequential(nn.Linear(hidden_size, gate_hidden_size), nn.Tanh(), gate)


def _call(module: nn.Module, x: Tensor) -> Tensor:
    """A gate or value layer in the precision of its own parameters, the result in float32 at least."""
    dtype = next(module.parameters()).dtype
    dtype = dtype if dtype.is_floating_point else x.dtype  # quantised weights bring their own arithmetic
    return module(x.to(dtype)).to(at_least_float32(dtype))


def _on_last_tap(like: Tensor, weights: Tensor) -> Tensor:
    """[kernel_size, d_v, D], zero but for the current token."""
    kernel = torch.zeros_like(like)
    kernel[-1] = weights
    return kernel
