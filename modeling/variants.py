"""The menu: what `residual["type"]` and `local_mixer["type"]` may say, and what their other keys mean.

    how the weights are made      along depth                                   along the sequence
    fixed                         standard                                      none
    learned, static               elc_bert, denseformer, laurel                 short_conv, canon
    from the newest state         mudd
    from the sources              dca, attn_res, delta_attn_res
    attention                     short_swa, vertical_attention                 short_swa
    parallel streams              hyper_connections, mhc
    rewrite of the state          ddl

Rows are operators, columns are axes; one operator file, short_swa.py, serves both cells of the attention row. The
other keys of the two dictionaries are the keyword-only arguments of the class, so a new variant is one file and one
line here.
"""

import inspect
import math
import types
import typing
from typing import Any

from torch import nn

from .depth import Residual, Site
from .depth_attn_res import AttentionResiduals, DeltaAttentionResiduals
from .depth_dca import DeepCrossAttention
from .depth_ddl import DeepDeltaLearning
from .depth_denseformer import DenseFormer
from .depth_elc_bert import ELCBert
from .depth_hyper_connections import HyperConnections
from .depth_laurel import LAuReL
from .depth_mhc import ManifoldHyperConnections
from .depth_mudd import MUDDFormer
from .depth_short_swa import DepthShortSWA
from .depth_vertical_attention import VerticalAttention
from .sequence import LocalMixer, Place, in_layer
from .sequence_canon import Canon
from .sequence_short_conv import ShortConv
from .sequence_short_swa import LocalShortSWA

RESIDUALS: dict[str, type[Residual]] = {
    "standard": Residual,
    "elc_bert": ELCBert,
    "denseformer": DenseFormer,
    "laurel": LAuReL,
    "vertical_attention": VerticalAttention,
    "dca": DeepCrossAttention,
    "mudd": MUDDFormer,
    "attn_res": AttentionResiduals,
    "delta_attn_res": DeltaAttentionResiduals,
    "short_swa": DepthShortSWA,
    "hyper_connections": HyperConnections,
    "mhc": ManifoldHyperConnections,
    "ddl": DeepDeltaLearning,
}

LOCAL_MIXERS: dict[str, type[LocalMixer]] = {
    "none": LocalMixer,
    "short_conv": ShortConv,
    "canon": Canon,
    "short_swa": LocalShortSWA,
}

LARGEST = 2**53  # whole numbers beyond this are no options, and some are no floating-point numbers either
AXES: dict[str, dict[str, type[nn.Module]]] = {"residual": RESIDUALS, "local_mixer": LOCAL_MIXERS}


def options_of(axis: str, kind: str) -> dict[str, inspect.Parameter]:
    """The options of a variant, by name: their defaults and types. `axis` is "residual" or "local_mixer"."""
    parameters = inspect.signature(AXES[axis][kind].__init__).parameters.values()
    options = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if axis == "local_mixer" and kind != "none":
        options["layers"] = inspect.Parameter(
            "layers", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=list[int] | None
        )
    return options


def resolve(axis: str, value: str | dict[str, Any] | None, config) -> dict[str, Any]:
    """A type name or a dictionary -> the dictionary with every option filled in.

    All of them are stored, so that a checkpoint keeps its meaning if a default ever changes. Raises ValueError with
    the menu for an unknown type or option, and with cause and remedy for a bad value.
    """
    menu = AXES[axis]
    value = {"type": value} if isinstance(value, str) else dict(value or {})
    kind = value.pop("type", None)
    if not isinstance(kind, str) or kind not in menu:
        raise ValueError(f"Unknown {axis} type {kind!r}; choose one of: {', '.join(menu)}.")
    known = options_of(axis, kind)
    if unknown := [name for name in value if name not in known]:
        menu_of_kind = f"; its options are: {', '.join(known)}." if known else ": it takes no options at all."
        raise ValueError(f"{axis} {kind!r} has no option {unknown[0]!r}{menu_of_kind}")
    options = {name: value.get(name, parameter.default) for name, parameter in known.items()}
    for name, option in options.items():
        if not _fits(option, known[name].annotation):
            expected = describe(known[name].annotation)
            raise ValueError(f"{axis} option {name!r} of {kind!r} must be {expected}, got {option!r}.")
    layers = options.pop("layers", None)
    if layers is not None:
        last = config.num_hidden_layers - 1
        if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(range(last + 1)):
            raise ValueError(
                f"local_mixer layers must be different numbers between 0 and {last}, at least one, got {layers}; null "
                "means all of them."
            )
        if options.get("site") == "embedding":
            raise ValueError("The site embedding stands before all layers, once: leave layers out (null).")
    menu[kind].check(config, **options)
    return {"type": kind, **options, **({"layers": layers} if "layers" in known else {})}


def build_residual(config, layer_idx: int, site: Site) -> Residual:
    """The residual of one sublayer, or (site "model") the one that opens and closes the stream."""
    options = dict(config.residual)
    return RESIDUALS[options.pop("type")](config, layer_idx, site, **options)


def local_places(config, layer_idx: int) -> tuple[Place, ...]:
    """The places of the local mixers of one layer; that of the embeddings counts as layer 0's."""
    options = dict(config.local_mixer)
    options.pop("layers", None)
    places = LOCAL_MIXERS[options.pop("type")].places(config, **options)
    if places == ("embedding",):
        return places if layer_idx == 0 else ()
    return places if in_layer(config, layer_idx) else ()


def build_local_mixer(config, layer_idx: int, place: Place) -> LocalMixer | None:
    """The local mixer at one place of one layer, if it has one there."""
    if place not in local_places(config, layer_idx):
        return None
    options = dict(config.local_mixer)
    options.pop("layers", None)
    return LOCAL_MIXERS[options.pop("type")](config, layer_idx, place, **options)


def check_together(config) -> None:
    """Raise ValueError for a residual and a local mixer that have no meaning together."""
    split = config.residual.get("split_qkv") or config.residual["type"] == "mudd"
    if split and any("attn" in local_places(config, layer_idx) for layer_idx in range(config.num_hidden_layers)):
        raise ValueError(
            f"The residual {config.residual['type']!r} gives queries, keys and values inputs of their own, so no "
            "local mixer can sit on attention's input (site attn, Canon A): choose another place."
        )


def cache_slots(config) -> list[int]:
    """For each layer, how many states besides keys and values its row of the cache holds."""
    residual = dict(config.residual)
    residual_class = RESIDUALS[residual.pop("type")]
    return [
        residual_class.cache_slots(config, layer_idx, **residual) + len(local_places(config, layer_idx))
        for layer_idx in range(config.num_hidden_layers)
    ]


def _fits(value: Any, annotation: Any) -> bool:
    """Whether an option's value has its annotated type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (abs(value) < LARGEST if isinstance(value, int) else math.isfinite(value))
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """The annotated type of an option, for people."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is typing.Literal:
        return "one of: " + ", ".join(arguments)
    if origin is list:
        return f"a list of {describe(arguments[0]).removeprefix('a ')}s"
    return {
        type(None): "null",
        int: "a whole number",
        float: "a finite number",
        bool: "true or false",
        str: "a string",
    }.get(annotation, annotation.__name__)
