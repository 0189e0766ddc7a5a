"""Everything a forward pass has to know about its tokens besides their embeddings, worked out once for all layers.

`generate` calls this ahead of a compiled forward, `forward` calls it itself otherwise; both use the same function,
because the library's own mapping drops padding for one-token chunks and sees unwritten slots of static caches.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    find_packed_sequence_indices,
    packed_sequence_mask_function,
)

from .compat import cache_argument

CREATE = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


def attention_type(config, layer_idx: int) -> str:
    """Whether the global attention of a layer is "full_attention" or "sliding_attention"."""
    return "sliding_attention" if "sliding" in config.layer_types[layer_idx] else "full_attention"


def create_masks(
    config,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> dict[str, Tensor | None]:
    """The masks of one forward pass over T tokens.

    full_attention, sliding_attention: causal mask of the layers with such global attention, if there are any, in the
        format of the attention backend.
    token_mask [B, T]: false for padding; None without padding.
    token_index [B, T]: how many tokens of its sequence (or packed document) precede each token.
    seq_idx [B, T]: the packed document that each token belongs to; None without packing, and with a cache.

    Raises ValueError for masks that local operators cannot follow, and for packed rows where they could not be kept
    apart.
    """
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2 and attention_mask.shape[1] < length:
        raise ValueError(f"The attention_mask has {attention_mask.shape[1]} columns for {length} tokens: one each.")
    token_mask, token_index = None, position_ids
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        columns = _columns(attention_mask, length, cache)
        token_mask = attention_mask.bool().index_select(1, columns)
        token_index = (attention_mask.long().cumsum(-1) - 1).clamp(min=0).index_select(1, columns)
        if config.number_of_conv_states and cache is not None and length > 1:
            _refuse_right_padding(token_mask, token_index)
    elif attention_mask is not None and config.number_of_conv_states:
        raise ValueError(
            "This model's local operators follow a 2-D attention_mask only, [batch, tokens] with 0 for padding."
        )

    # Rows are packed where positions start again; a 2-D mask says that they are not, unless `seq_idx` insists.
    looks = cache is None or (length > 1 and not torch.compiler.is_compiling())
    if looks and seq_idx is None and attention_mask is None and position_ids is not None:
        seq_idx = find_packed_sequence_indices(position_ids)
    same_document = None
    if seq_idx is not None:
        if seq_idx.shape[-1] != length or seq_idx.dim() != 2:
            raise ValueError(f"seq_idx has the shape {list(seq_idx.shape)}: give [batch, {length}], one per token.")
        _refuse_what_packing_cannot_do(config, inputs_embeds, cache, position_ids, kwargs)
        seq_idx = seq_idx.expand(len(inputs_embeds), -1)
        same_document = packed_sequence_mask_function(seq_idx)
        token_index = _index_in_document(seq_idx)

    # A static cache that records its past does not count as compileable, so the library would let one query attend to
    # slots that nothing was written to.
    skip = not (length == 1 and isinstance(cache, StaticCache))
    types = [attention_type(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
    attention_masks = {
        kind: create(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids if seq_idx is None else None,
            layer_idx=types.index(kind),
            and_mask_function=same_document,
            allow_is_causal_skip=skip,
            **cache_argument(cache),
        )
        for kind, create in CREATE.items()
        if kind in types
    }
    return {
        **attention_masks,
        "token_mask": token_mask,
        "token_index": token_index,
        "seq_idx": seq_idx,
    }


def _columns(attention_mask: Tensor, length: int, cache: Cache | None) -> Tensor:
    """Where the new tokens are in a mask [B, past + T], which may reach further (chunks) or hold them alone: [T]"""
    columns = torch.arange(length, device=attention_mask.device)
    width = attention_mask.shape[1]
    if cache is None or width <= length:
        return columns + (width - length)
    past = cache.get_seq_length()
    return columns + (past.to(columns.device) if isinstance(past, Tensor) else past)


def _refuse_right_padding(token_mask: Tensor, token_index: Tensor) -> None:
    """Padding after a row's tokens would stand between them and the next ones, in every local operator's memory."""
    if not torch.compiler.is_compiling() and (~token_mask[:, -1] & (token_index[:, -1] > 0)).any():
        raise ValueError(
            "Local operators with a cache need padding on the left: set tokenizer.padding_side = 'left', or pass no "
            "cache."
        )


def is_right_padded(attention_mask: Tensor | dict[str, Tensor | None] | None) -> bool:
    """Whether some row of a 2-D mask ends in padding after tokens."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return False
    mask = attention_mask.bool()
    return bool((~mask[:, -1] & mask.any(-1)).any())


def _refuse_what_packing_cannot_do(config, inputs_embeds, cache, position_ids, kwargs: dict[str, Any]) -> None:
    if isinstance(cache, StaticCache) or (cache is not None and cache.get_seq_length() > 0):
        raise ValueError(
            "Packed rows (seq_idx, or position_ids that start again) start at their first token, so they cannot go on "
            "from a cache, nor fill a static one: pass no cache, or an attention_mask if the row is one document."
        )
    one_row = len(inputs_embeds) == 1 and position_ids is not None
    flash = "flash" in (config._attn_implementation or "")
    if flash and not one_row and kwargs.get("cu_seq_lens_q") is None:
        raise ValueError(
            "Flash attention tells packed documents apart by cu_seq_lens_q and its companions, or in a batch of one "
            "row by position_ids that start again: pass one of them, or use attn_implementation='sdpa'."
        )


def _index_in_document(seq_idx: Tensor) -> Tensor:
    """[B, T], how many tokens of the same packed document precede each token"""
    steps = torch.arange(seq_idx.shape[1], device=seq_idx.device).expand_as(seq_idx)
    starts = torch.diff(seq_idx, prepend=seq_idx[:, :1] - 1) != 0
    return steps - torch.where(starts, steps, 0).cummax(-1).values
