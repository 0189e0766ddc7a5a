"""The configuration of the converted model: every field of the source, plus one entry per axis."""

import copy
from typing import Any

from transformer2 import Transformer2Config
from transformer2.conversion.families import backbone_fields, one_line
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.errors import UserError
from transformer2.modeling_transformer2 import AUTO_MAP
from transformer2.variants import AXES, options_of, resolve

PLAIN = {"residual": "standard", "local_mixer": "none"}
OWN_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "converted_from", *PLAIN)


def present(source: LlamaSource, axis: str) -> dict[str, Any]:
    """What the source has on an axis: its own choice if it is one of ours, else the plain one."""
    if source.config.model_type == "transformer2":
        return copy.deepcopy(getattr(source.config, axis))
    return {"type": PLAIN[axis]}


def identity_choice(axis: str, choice: str | dict[str, Any]) -> dict[str, Any]:
    """A choice on one axis as a dictionary, with `form: "identity"` where the variant has forms and none is given."""
    choice = {"type": choice} if isinstance(choice, str) else copy.deepcopy(dict(choice))
    kind = choice.get("type")
    if kind in AXES[axis] and "form" in options_of(axis, kind):
        choice.setdefault("form", "identity")
    return choice


def refuse_unknown_names(axis: str, choice: str | dict[str, Any] | None) -> None:
    """Raise UserError, with the menu, for an unknown variant or option: before anything is downloaded."""
    if choice is None:
        return
    choice = identity_choice(axis, choice)
    kind = choice.get("type")
    if kind not in AXES[axis] or set(choice) - {"type", *options_of(axis, kind)}:
        try:
            resolve(axis, choice, None)  # gets no further than the names
        except ValueError as error:
            raise UserError(one_line(error)) from None


def build_config(
    source: LlamaSource, residual: str | dict[str, Any] | None, local_mixer: str | dict[str, Any] | None
) -> Transformer2Config:
    """The target's configuration. None on an axis: what the source has there.

    Raises UserError, with the menu, for an unknown variant or a bad option, and for one in the place of another that
    the source has already.
    """
    from huggingface_hub.errors import StrictDataclassError

    fields = backbone_fields(source.config)
    dtype = fields.get("dtype") or source.dtype
    fields = {name: value for name, value in fields.items() if name not in OWN_FIELDS and not name.startswith("_")}
    try:
        config = Transformer2Config(
            **fields,
            residual=identity_choice("residual", residual or present(source, "residual")),
            local_mixer=identity_choice("local_mixer", local_mixer or present(source, "local_mixer")),
        )
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(one_line(error)) from None
    for axis, plain in PLAIN.items():
        kept = present(source, axis)
        if kept["type"] != plain and kept != getattr(config, axis):
            raise UserError(
                f"The source has {axis} {kept['type']!r} already, whose weights another one would lose: leave the "
                f"{axis} out to keep it, or convert the model that the source was made from."
            )
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


def departs_from_identity(config: Transformer2Config, source: LlamaSource | None = None) -> str | None:
    """Why the converted model does not start as the source (without one: as a Llama), or None if it does."""
    for axis in AXES:
        form = getattr(config, axis).get("form", "identity")
        if form != "identity" and (source is None or getattr(config, axis) != present(source, axis)):
            return f"{axis} {getattr(config, axis)['type']!r} in its {form!r} form"
    return None
