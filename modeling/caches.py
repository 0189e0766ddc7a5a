"""The library's two-state cache layers (keys and values, plus the states of local operators), repaired.

Up to transformers 5.24 the hybrid layers take some methods from the wrong base class: static ones cannot be cropped
and deny their length, and batch operations and offloading treat the extra states wrongly. These subclasses put that
right; `repair` puts them into a cache in place of the library's, without registering anything.
"""

import copy
from collections.abc import Callable

from torch import Tensor
from transformers import cache_utils as library
from transformers.cache_utils import Cache

from .masks import attention_type

QUANTIZED = getattr(library, "BaseQuantizedLayer", library.QuantizedLayer)  # 5.24 or older


class _Repaired:
    """What holds for dynamic and static layers alike. `attention` is the class that keeps the keys and values."""

    _layer_type = None  # a type would replace the library's class for the whole process
    attention: type

    def _apply(self, function: Callable[[Tensor], Tensor]) -> None:
        for slot, filled in self.is_conv_states_initialized.items():
            if filled:
                self.conv_states[slot] = function(self.conv_states[slot])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)
        self._apply(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.get_seq_length() > 0:
            self.keys, self.values = self.keys[indices, ...], self.values[indices, ...]
        self._apply(lambda state: state[indices, ...])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens (as a count, negative or not), of which `activate_past_recording` kept the past."""
        if not self.record_past:
            raise RuntimeError("Call `activate_past_recording` before the tokens that `crop` is to remove.")
        if not hasattr(self.attention, "crop"):
            raise RuntimeError("This transformers cannot roll back a static cache: install 5.24 or newer.")
        self.attention.crop(self, tokens_to_remove)
        for slot, filled in self.is_conv_states_initialized.items():
            if filled:
                kept = self.conv_states[slot].shape[-1] - abs(tokens_to_remove)
                start = max(kept - self.conv_kernel_size[slot], 0)
                self.conv_states[slot] = self.conv_states[slot][..., start:kept]

    def offload(self) -> None:
        self.attention.offload(self)  # not the states: operators after attention still need them

    def prefetch(self) -> None:
        self.attention.prefetch(self)


class DynamicHybridLayer(_Repaired, library.LinearAttentionAndFullAttentionLayer):
    attention = library.DynamicLayer


class DynamicSlidingHybridLayer(_Repaired, library.LinearAttentionAndSlidingWindowAttentionLayer):
    attention = library.DynamicSlidingWindowLayer

    def get_max_length(self) -> int:
        return self.sliding_window


class StaticHybridLayer(_Repaired, library.LinearAttentionAndStaticFullAttentionLayer):
    attention = library.StaticLayer
    supports_early_init = True

    def get_max_length(self) -> int:
        return self.max_cache_len


class StaticSlidingHybridLayer(_Repaired, library.LinearAttentionAndStaticSlidingWindowAttentionLayer):
    attention = library.StaticSlidingWindowLayer
    supports_early_init = True

    def get_max_length(self) -> int:
        return self.max_cache_len

    @property
    def is_croppable(self) -> bool:
        """Tokens that have left the window cannot be brought back."""
        return self._is_croppable and any(self.is_conv_states_initialized.values())


class QuantizedHybridLayer(DynamicHybridLayer):
    """The states of local operators as they are, around a layer of the library that quantises keys and values."""

    is_croppable = False

    def __init__(self, quantized: library.CacheLayerMixin, number_of_states: int):
        super().__init__(number_of_states=number_of_states)
        self.quantized = quantized

    def update(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        return self.quantized.update(*args, **kwargs)

    def get_seq_length(self) -> int:
        return self.quantized.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.quantized.get_mask_sizes(query_length)

    def reset(self) -> None:
        library.LinearAttentionLayer.reset(self)
        self.quantized.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        library.LinearAttentionLayer.reorder_cache(self, beam_idx)
        self.quantized.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("A quantised cache cannot be repeated: use cache_implementation='dynamic'.")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("Rows of a quantised cache cannot be selected: use cache_implementation='dynamic'.")


def repair(cache: Cache | None, config) -> None:
    """Make `cache` fit a model of this configuration, in place.

    Unused hybrid layers are replaced by the repaired ones, and a `DynamicCache()` that was made without a
    configuration, or a `QuantizedCache`, gets the layers that this model needs. Layers that already hold data are left
    alone.
    """
    if not isinstance(cache, Cache) or config.number_of_conv_states == 0:
        return
    if isinstance(cache, library.DynamicCache) and not cache.layers:
        cache.layers.extend(library.DynamicCache(config=config).layers)
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "is_initialized", False):
            continue
        repaired = _repaired(layer, config, index)
        if repaired is not layer and getattr(layer, "record_past", False):
            repaired.activate_past_recording()
        cache.layers[index] = repaired
    hybrid = [layer for layer, kind in zip(cache.layers, config.layer_types, strict=False) if "hybrid" in kind]
    if not all(hasattr(layer, "update_conv_state") for layer in hybrid):
        raise ValueError(
            "This cache was made for another model and cannot keep the states of local operators: make it with "
            "config=model.config, or leave it out."
        )


def _repaired(layer: library.CacheLayerMixin, config, layer_idx: int) -> library.CacheLayerMixin:
    """What takes the place of an unused layer of the library."""
    if type(layer) is library.LinearAttentionAndFullAttentionLayer:
        return DynamicHybridLayer(number_of_states=layer.number_of_states)
    if type(layer) is library.LinearAttentionAndSlidingWindowAttentionLayer:
        return DynamicSlidingHybridLayer(layer.sliding_window, number_of_states=layer.number_of_states)
    if type(layer) is library.LinearAttentionAndStaticFullAttentionLayer:
        return StaticHybridLayer(layer.max_cache_len, number_of_states=layer.number_of_states)
    if type(layer) is library.LinearAttentionAndStaticSlidingWindowAttentionLayer:
        # The library keeps the smaller of window and capacity, and whether it was the capacity.
        repaired = StaticSlidingHybridLayer(layer.max_cache_len, layer.max_cache_len, layer.number_of_states)
        repaired._is_croppable = getattr(layer, "_is_croppable", False)  # unknown before 5.24, as is cropping
        return repaired
    if isinstance(layer, QUANTIZED) and config.layer_types[layer_idx] == "hybrid":
        return QuantizedHybridLayer(layer, config.number_of_conv_states)
    return layer


def require_room(cache: Cache | None, config, length: int) -> None:
    """Raise ValueError if a static cache cannot hold `length` more tokens."""
    for layer in cache.layers if isinstance(cache, Cache) else ():
        # A sliding layer never fills up, unless the cache is shorter than its window.
        slides = isinstance(layer, library.StaticSlidingWindowLayer) and layer.max_cache_len >= config.sliding_window
        if isinstance(layer, library.StaticLayer) and not slides:
            used = int(layer.get_seq_length())
            if used + length > layer.max_cache_len:
                raise ValueError(
                    f"The static cache holds {layer.max_cache_len} tokens, and {used + length} are needed: make it "
                    "with a larger max_cache_len."
                )
            return


def without_states(config):
    """The configuration as seen by a cache that knows keys and values only."""
    plain = copy.copy(config)
    plain.layer_types = [attention_type(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
    return plain
