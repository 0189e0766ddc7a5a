"""Presets: shapes of known models and, for every variant, the options that its paper or our measurements recommend.

    preset("mudd-135m")                 MUDDFormer in the shape of SmolLM2-135M
    preset("ddl+short_swa-1b")          two axes in the shape of Llama-3.2-1B
    variant("residual", "mudd", "8b")   the options alone, for a conversion

A name is RESIDUAL[+LOCAL_MIXER]-SIZE, and the parts are the files in `residual/`, `local_mixer/` and `sizes/`. Example
configurations of training runs are in `train/`.
"""

import json
import math
from pathlib import Path
from typing import Any

from transformer2 import Transformer2Config

FOLDER = Path(__file__).parent
PARTS = ("residual", "local_mixer", "sizes")


def names(part: str) -> dict[str, str]:
    """What there is of one part ("residual", "local_mixer" or "sizes"), by name, with a sentence about each."""
    files = sorted((FOLDER / part).glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8"))["about"] for file in files}


def variant(axis: str, name: str, size: str | None = None) -> dict[str, Any]:
    """The options of a preset on one axis ("residual" or "local_mixer"), those of a size included.

    Raises ValueError, with the menu, for an unknown name.
    """
    entry = _read(axis, name)
    return {**entry["options"], **entry.get("sizes", {}).get(size, {})}


def preset(name: str, **overrides: Any) -> Transformer2Config:
    """The configuration called RESIDUAL[+LOCAL_MIXER]-SIZE; `overrides` replace fields of it.

    Raises ValueError, with the menu, for an unknown name.
    """
    variants = preset_variants(name)
    fields = {key: value for key, value in _read("sizes", name.rpartition("-")[2]).items() if key != "about"}
    return Transformer2Config(**{**fields, **variants, **overrides})


def preset_variants(name: str) -> dict[str, dict[str, Any]]:
    """The fields `residual` and `local_mixer` of RESIDUAL[+LOCAL_MIXER]-SIZE.

    Raises ValueError, with the menu, for an unknown name.
    """
    axes, dash, size = name.rpartition("-")
    if not dash:
        raise ValueError(
            f"The preset {name!r} should read RESIDUAL-SIZE or RESIDUAL+LOCAL_MIXER-SIZE, such as ddl-135m; the sizes "
            f"are: {', '.join(names('sizes'))}."
        )
    _read("sizes", size)
    residual, plus, local_mixer = axes.partition("+")
    return {
        "residual": variant("residual", residual, size),
        "local_mixer": variant("local_mixer", local_mixer if plus else "none", size),
    }


def nearest_size(config: Transformer2Config) -> str:
    """The size whose width and depth are most like those of a model."""

    def distance(size: str) -> float:
        shape = _read("sizes", size)
        fields = ("hidden_size", "num_hidden_layers")
        return sum(abs(math.log(shape[field] / getattr(config, field))) for field in fields)

    return min(names("sizes"), key=distance)


def _read(part: str, name: str) -> dict[str, Any]:
    menu = names(part)
    if name not in menu:  # looked up, never joined to a path
        raise ValueError(f"There is no {part.removesuffix('s')} preset {name!r}; choose one of: {', '.join(menu)}.")
    return json.loads((FOLDER / part / f"{name}.json").read_text(encoding="utf-8"))
