"""The configuration of the converted model: every Llama field of the source, plus one entry per axis."""

import copy
from typing import Any

from transformer2 import Transformer2Config
from transformer2.conversion.llama_sources import LlamaSource, one_line
from transformer2.errors import UserError
from transformer2.modeling_transformer2 import AUTO_MAP
from transformer2.variants import AXES, options_of, resolve

OWN_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "residual", "local_mixer")


def identity_choice(axis: str, choice: str | dict[str, Any]) -> dict[str, Any]:
    """A choice on one axis as a dictionary, with `form: "identity"` where the variant has forms and none is given."""
    choice = {"type": choice} if isinstance(choice, str) else copy.deepcopy(dict(choice))
    kind = choice.get("type")
    if kind in AXES[axis] and "form" in options_of(axis, kind):
        choice.setdefault("form", "identity")
    return choice


def refuse_unknown_names(axis: str, choice: str | dict[str, Any]) -> None:
    """Raise UserError, with the menu, for an unknown variant or option: before anything is downloaded."""
    choice = identity_choice(axis, choice)
    kind = choice.get("type")
    if kind not in AXES[axis] or set(choice) - {"type", *options_of(axis, kind)}:
        try:
            resolve(axis, choice, None)  # gets no further than the names
        except ValueError as error:
            raise UserError(one_line(error)) from None


def build_config(
    source: LlamaSource, residual: str | dict[str, Any], local_mixer: str | dict[str, Any]
) -> Transformer2Config:
    """The target's configuration. Raises UserError, with the menu, for an unknown variant or a bad option."""
    from huggingface_hub.errors import StrictDataclassError

    fields = source.config.to_dict()
    dtype = fields.get("dtype") or source.dtype
    fields = {name: value for name, value in fields.items() if name not in OWN_FIELDS and not name.startswith("_")}
    try:
        config = Transformer2Config(
            **fields,
            residual=identity_choice("residual", residual),
            local_mixer=identity_choice("local_mixer", local_mixer),
        )
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(one_line(error)) from None
    config.dtype = dtype
    config.architectures = ["Transformer2ForCausalLM"]
    config.auto_map = {
        "AutoConfig": "configuration_transformer2.Transformer2Config",
        **{auto_class: f"modeling_transformer2.{name}" for auto_class, name in AUTO_MAP.items()},
    }
    return config


def config_json(config: Transformer2Config) -> dict[str, Any]:
    """What config.json holds: all declared fields, so that no later default changes the model, and what was set."""
    full, changed = config.to_dict(), config.to_diff_dict()
    declared = {name: full[name] for name in Transformer2Config.__annotations__ if name in full}
    merged = {**changed, **declared}
    return {name: merged[name] for name in sorted(merged) if not name.startswith("_")}


def departs_from_identity(config: Transformer2Config) -> str | None:
    """Why the converted model does not start as the source, or None if it does."""
    for axis in AXES:
        form = getattr(config, axis).get("form", "identity")
        if form != "identity":
            return f"{axis} {getattr(config, axis)['type']!r} in its {form!r} form"
    return None
