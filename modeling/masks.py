"""Everything a forward pass has to know about its tokens besides their embeddings, worked out once for all layers.

`generate` calls this ahead of a compiled forward, `forward` calls it itself otherwise; both use the same function,
because the library's own mapping drops padding for one-token chunks and sees unwritten slots of static caches.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, StaticCache
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices, packed_sequence_mask_function

from .compat import cache_argument


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

    full_attention: causal mask of global attention, in the format of the attention backend.
    token_mask [B, T]: false for padding; None without padding.
    token_index [B, T]: how many tokens of its sequence (or packed document) precede each token.
    seq_idx [B, T]: the packed document that each token belongs to; None without packing, and with a cache.
    """
    length = inputs_embeds.shape[1]
    token_mask, token_index = None, position_ids
    if attention_mask is not None and attention_mask.dim() == 2:
        token_mask = attention_mask[:, -length:].bool()
        token_index = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]

    # Rows are packed where positions start again; a 2-D mask says that they are not, unless `seq_idx` insists.
    if seq_idx is None and attention_mask is None and cache is None and position_ids is not None:
        seq_idx = find_packed_sequence_indices(position_ids)
    same_document = None if seq_idx is None else packed_sequence_mask_function(seq_idx.expand(len(inputs_embeds), -1))
    if seq_idx is not None:
        token_index = position_ids

    # A static cache that records its past does not count as compileable, so the library would let one query attend to
    # slots that nothing was written to.
    skip = not (length == 1 and isinstance(cache, StaticCache))
    full_attention = create_causal_mask(
        config=config,
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        position_ids=position_ids if seq_idx is None else None,
        layer_idx=0,
        and_mask_function=same_document,
        allow_is_causal_skip=skip,
        **cache_argument(cache),
    )
    return {
        "full_attention": full_attention,
        "token_mask": token_mask,
        "token_index": token_index,
        "seq_idx": seq_idx,
    }
