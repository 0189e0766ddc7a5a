"""ShortSWA on the sequence axis: each token reads the last `window` tokens of the same layer.

Sources: Rethinking SWA (Zhang, 2025); Residual Stream Duality (arXiv 2603.16039), section 2.4 and Algorithm 1:

    S = H + ShortSWA(Norm(H); w)        A = S + Attn(Norm(S))        H' = A + MLP(Norm(A))
"""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .layers import apply_rotary, rope_frequencies, rotations
from .sequence import LeftContext, LocalMixer, Place, width_of
from .short_swa import ShortSWA, windowed_attention


class LocalShortSWA(LocalMixer):
    """ShortSWA (arXiv 2603.16039): attention over the last few tokens, a sublayer of its own before global attention.

    `windowed_attention` computes it. Flash attention does, if the model uses that, where nothing but padding has to be
    masked: without a cache, packed rows and chunks.

    form: "paper" (all projections random) or "identity" (zero output projection, for pretrained models).
    site: "layer", a sublayer with its own norm; or added to the normalised input of attention ("attn") or the MLP
        ("mlp"), to queries, keys and values ("qkv"), or to the embeddings ("embedding").
    window: tokens that a token sees, itself included.
    mask: "sliding", or "chunk" for windows aligned to multiples of `window` (a token sees its own chunk so far).
    num_heads, num_kv_heads, head_dim: None for those of global attention.
    rope: rotate queries and keys by their positions, with the model's base frequency. Windows are short, so the
        model's rope scaling, which stretches long distances, does not apply.
    """

    dormant = (r"\.local_layernorm\.", r"local_mixer.*\.swa\.(query|key|value)\.")

    def __init__(
        self,
        config,
        layer_idx: int,
        place: Place,
        *,
        form: Literal["paper", "identity"] = "paper",
        site: Literal["layer", "attn", "mlp", "qkv", "embedding"] = "layer",
        window: int = 128,
        mask: Literal["sliding", "chunk"] = "sliding",
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope: bool = True,
    ):
        super().__init__(config, layer_idx, place)
        self.config, self.is_causal = config, True  # flash attention asks for them
        num_heads, num_kv_heads, head_dim = _heads(config, num_heads, num_kv_heads, head_dim)
        self.window, self.chunked, self.rope = window, mask == "chunk", rope
        self.rope_theta = config.rope_parameters["rope_theta"]
        width = width_of(config, place)
        self.swa = ShortSWA(width, num_heads, num_kv_heads, head_dim, window, form == "identity")
        self.context = LeftContext(window - 1, layer_idx)

    @classmethod
    def check(cls, config, **options: Any) -> None:
        if options["window"] < 2:
            raise ValueError(
                f"ShortSWA's window counts the token itself, so it needs at least 2, got window={options['window']}; "
                'use local_mixer="none" for no local mixing.'
            )
        if options["window"] > 2**16:
            raise ValueError(f"ShortSWA is for short windows, up to 65,536 tokens, got window={options['window']}.")
        num_heads, num_kv_heads, head_dim = _heads(
            config, options["num_heads"], options["num_kv_heads"], options["head_dim"]
        )
        if max(num_heads, num_kv_heads, head_dim) > 2**16:
            raise ValueError("ShortSWA's num_heads, num_kv_heads and head_dim must not exceed 65,536.")
        if min(num_heads, num_kv_heads, head_dim) < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"ShortSWA needs num_heads ({num_heads}) to be a positive multiple of num_kv_heads ({num_kv_heads}), "
                f"and head_dim ({head_dim}) to be positive."
            )
        if options["rope"] and head_dim % 2:
            raise ValueError(f"RoPE rotates pairs, so head_dim must be even, got {head_dim}; or set rope=false.")

    @classmethod
    def places(cls, config, **options: Any) -> tuple[Place, ...]:
        return (options["site"],)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        token_index: Tensor | None = None,
        token_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **tokens: Any,
    ) -> Tensor:
        """[B, T, C] -> [B, T, C]"""
        swa = self.swa
        query, key, value = (
            swa.split(swa.query(x)),
            swa.split(swa.key(x)),
            swa.value(x),
        )  # [B, H, T, d], ..., [B, T, G d]
        if self.rope:
            cos, sin = rotations(position_ids, rope_frequencies(swa.head_dim, self.rope_theta, x.device))
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)

        backend = self.config._attn_implementation or ""
        if "flash" in backend and not self.chunked and seq_idx is None and tokens.get("cache") is None:
            mixed, _ = ALL_ATTENTION_FUNCTIONS[backend](
                self,
                query,
                key,
                swa.split(value),
                token_mask,
                scaling=swa.head_dim**-0.5,
                sliding_window=self.window,
            )
            return swa.output(mixed.flatten(-2))

        # Keys, values and a channel of ones travel through the cache together: a zero there is a token that is not.
        key = key.transpose(1, 2).flatten(-2)
        entries = torch.cat((key, value, torch.ones_like(x[..., :1])), dim=-1)
        entries = self.context(entries, token_mask=token_mask, **tokens)
        key, value, exists = entries.split((key.shape[-1], value.shape[-1], 1), dim=-1)

        if seq_idx is not None:  # packed rows start at their first token: nothing is cached before it
            seq_idx = torch.nn.functional.pad(seq_idx, (self.window - 1, 0), value=-1)
        mixed = windowed_attention(
            query,
            swa.split(key),
            swa.split(value),
            self.window,
            valid=exists.squeeze(-1) > 0.5,
            reach=token_index % self.window if self.chunked else None,
            seq_idx=seq_idx,
        )
        return swa.merge(mixed)


def _heads(config, num_heads: int | None, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
    """Those of global attention where not given; key-value heads follow the heads where those are given."""
    if num_kv_heads is None:
        num_kv_heads = config.num_key_value_heads if num_heads is None else num_heads
    num_heads = config.num_attention_heads if num_heads is None else num_heads
    return num_heads, num_kv_heads, config.head_dim if head_dim is None else head_dim
