"""The one name that differs between the supported versions of transformers.

5.24 renamed the argument and output field `past_key_values` to `cache`. We say `cache`; older versions are told the
name that they know.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
_MASK_ARGUMENT = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def cache_argument(cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of the library's mask functions."""
    return {_MASK_ARGUMENT: cache}


def cache_field(cache: Cache | None) -> dict[str, Cache | None]:
    """The cache as a keyword argument of the library's output classes."""
    return {CACHE_FIELD: cache}


def takes_either_cache_name(forward: Callable) -> Callable:
    """Let a `forward` that takes `cache` be called with `past_key_values` as well."""

    @functools.wraps(forward)
    def wrapper(self, *args: Any, **kwargs: Any):
        if "past_key_values" in kwargs:
            past_key_values = kwargs.pop("past_key_values")
            if CACHE_FIELD == "cache":
                warnings.warn("`past_key_values` is deprecated, use `cache`.", FutureWarning, stacklevel=2)
            kwargs["cache"] = past_key_values if kwargs.get("cache") is None else kwargs["cache"]
        return forward(self, *args, **kwargs)

    return wrapper
