"""The architectures that the backbone holds: Llama, its relatives, and this family itself.

A source's own class stays the judge of its tensors and of its logits; only its configuration is translated here.
"""

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformer2 import Transformer2Config
from transformer2.errors import UserError


@dataclass(frozen=True)
class Family:
    """The classes of an architecture, and how its configuration reads in ours.

    ours: the fields that our configuration needs besides those that both call the same; foreign: its fields whose
    meaning is in `ours` or in `sliding_window` and `layer_types` already.
    """

    model: str
    config: str
    ours: Callable[[Any], dict[str, Any]] = lambda config: {}
    foreign: tuple[str, ...] = ()


SLIDING = ("use_sliding_window", "max_window_layers")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "mistral": Family("MistralForCausalLM", "MistralConfig"),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        lambda config: {"attention_bias": True, "attention_output_bias": False},
        SLIDING,
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", lambda config: {"qk_norm": True}, SLIDING),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        lambda config: {"nope_layers": [layer for layer, rope in enumerate(config.no_rope_layers) if not rope]},
        (*SLIDING, "no_rope_layers", "no_rope_layer_interval"),
    ),
    "transformer2": Family("Transformer2ForCausalLM", "Transformer2Config"),
}


def family_of(config: dict[str, Any], architectures: bool = True) -> Family:
    """The family of a config.json, by its `model_type` and, if wanted, its head.

    Raises UserError, with the menu, for any other.
    """
    kind, heads = config.get("model_type"), config.get("architectures") or []
    if kind not in FAMILIES:
        if kind is None:
            raise UserError("config.json names no model_type, so it is not known what the source is: restore it.")
        raise UserError(f"config.json says {kind!r}, and only these can be converted: {', '.join(FAMILIES)}.")
    family = FAMILIES[kind]
    if architectures and heads and family.model not in heads:
        raise UserError(f"Of {kind} models, only {family.model} can be converted, and config.json says {heads[0]}.")
    return family


def class_named(name: str) -> Any:
    """A class of transformers or, with our prefix, of this package."""
    import transformers

    import transformer2

    return getattr(transformer2 if name.startswith("Transformer2") else transformers, name)


def read_config(config: dict[str, Any]) -> Any:
    """config.json as its family's own class reads it: rope settings in today's form, all defaults filled in.

    Raises UserError if that class refuses it, or would not be the one that reads it.
    """
    from huggingface_hub.errors import StrictDataclassError

    config_class = class_named(family_of(config, architectures=False).config)
    if config.get("layer_types") and "layer_types" not in {field.name for field in dataclasses.fields(config_class)}:
        raise UserError(
            f"config.json says {config['model_type']!r} with layer_types, which such models do not have (transformers "
            "reads a Mistral with them as Ministral): remove layer_types if the model has none."
        )
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"config.json says partial_rotary_factor {config['partial_rotary_factor']!r}, which no "
            f"{config['model_type']} model has: the source is another architecture, or the field is to be removed."
        )
    try:
        return config_class.from_dict(copy.deepcopy(config))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise UserError(f"transformers refuses the source's config.json: {one_line(error)}") from None


def backbone_fields(config: Any) -> dict[str, Any]:
    """All fields of a source's configuration, as ours names them. config: of any family.

    A field that only we know means nothing in the source, even if its config.json has it: Llama ignores a
    `sliding_window`.
    """
    family = FAMILIES[config.model_type]
    known = {"head_dim", *(field.name for field in dataclasses.fields(config))}  # Qwen2 reads it undeclared
    ignored = {*family.foreign, *(set(Transformer2Config.__annotations__) - known)}
    fields = {name: value for name, value in config.to_dict().items() if name not in ignored}
    return {**fields, **family.ours(config)}


def one_line(error: Exception) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(error).split())
