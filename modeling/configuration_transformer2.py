"""Transformer2 configuration: Llama's fields, plus one entry per axis."""

from typing import Any

from transformers.configuration_utils import PreTrainedConfig, strict
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import logging

from .variants import cache_slots, check_together, resolve

logger = logging.get_logger(__name__)

# One more whenever older code would compute something else from a new checkpoint, or could not load it.
CODE_VERSION = 1
# For full and for sliding attention: without and with states besides keys and values.
LAYER_TYPES = {False: ("full_attention", "hybrid"), True: ("sliding_attention", "hybrid_sliding")}


@strict
class Transformer2Config(PreTrainedConfig):
    """
    Configuration of a Transformer2 model. All fields of a Llama configuration mean what they mean there; the next five
    admit Llama's relatives (Mistral, Qwen2, Qwen3, SmolLM3).

    attention_output_bias (`bool`, defaults to that of `attention_bias`):
        Whether attention's output projection has a bias, where that differs from queries, keys and values.
    qk_norm (`bool`, defaults to `False`):
        Whether the queries and keys of each head are normalised before they are rotated.
    nope_layers (`list[int]`, *optional*):
        The layers whose attention does not rotate by position.
    sliding_window (`int`, *optional*):
        How many tokens the layers of sliding global attention see, themselves included.
    layer_types (`list[str]`, *optional*):
        "full_attention" or "sliding_attention" for each layer; by default all slide where `sliding_window` is set.
        Stored as "hybrid" or "hybrid_sliding" for layers whose row of the cache holds states besides keys and values.

    residual (`str` or `dict`, defaults to `"standard"`):
        How sublayers share the residual stream, e.g. `{"type": "ddl", "value_channels": 4}`; a bare string stands for
        the dictionary with that type. The other keys are the options of the variant, see `variants.RESIDUALS`. Stored
        with every option filled in.
    local_mixer (`str` or `dict`, defaults to `"none"`):
        What mixes nearby tokens, e.g. `{"type": "short_swa", "window": 64}`, see `variants.LOCAL_MIXERS`.

    code_version (`int`):
        Of the model code that wrote the checkpoint. A newer one than that of this code gives a warning.

    Raises ValueError, with the menu, for an unknown type or option.
    """

    model_type = "transformer2"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False
    attention_output_bias: bool | None = None
    qk_norm: bool = False
    nope_layers: list[int] | None = None
    sliding_window: int | None = None
    residual: str | dict[str, Any] | None = None
    local_mixer: str | dict[str, Any] | None = None
    layer_types: list[str] | None = None
    code_version: int = CODE_VERSION
    number_of_conv_states: int = 0

    def __post_init__(self, **kwargs):
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.head_dim % 2:  # newer versions of the library check it themselves
            raise ValueError(f"RoPE requires an even rotary dimension, and head_dim is {self.head_dim}.")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if self.code_version > CODE_VERSION:
            logger.warning(
                f"This checkpoint was written by version {self.code_version} of the model code, and version "
                f"{CODE_VERSION} is installed, which may differ: upgrade transformer2, or uninstall it "
                "and load the code in the checkpoint by trust_remote_code=True."
            )
        self.code_version = CODE_VERSION  # saving writes this code next to it
        self._resolve_variants()
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigning a variant or the depth, as overrides of `from_pretrained` do, brings what follows up to date."""
        super().__setattr__(name, value)
        # While it is constructed, the fields after these are not set yet; the last one is `number_of_conv_states`.
        if name in ("residual", "local_mixer", "num_hidden_layers") and "number_of_conv_states" in self.__dict__:
            self._resolve_variants()

    def _resolve_variants(self) -> None:
        """Fill in the options of both axes, and the two fields that the library's caches read."""
        for axis, default in {"residual": "standard", "local_mixer": "none"}.items():
            super().__setattr__(axis, resolve(axis, getattr(self, axis) or default, self))
        check_together(self)
        slots = cache_slots(self)
        self.number_of_conv_states = max(slots, default=0)
        slides = self._slides()
        self.layer_types = [LAYER_TYPES[slide][count > 0] for slide, count in zip(slides, slots, strict=True)]

    def _slides(self) -> list[bool]:
        """Whether the global attention of each layer slides. Raises ValueError for fields that do not fit together."""
        depth, types = self.num_hidden_layers, self.layer_types
        if types is None:
            types = ["full_attention" if self.sliding_window is None else "sliding_attention"] * depth
        if len(set(types)) == 1:
            types = types[:1] * depth
        known = [name for names in LAYER_TYPES.values() for name in names]
        if unknown := [name for name in types if name not in known]:
            raise ValueError(f"layer_types may hold full_attention and sliding_attention, got {unknown[0]!r}.")
        if len(types) < depth:
            raise ValueError(f"layer_types has {len(types)} entries for {depth} layers: give one for each.")
        slides = [name in LAYER_TYPES[True] for name in types[:depth]]
        if any(slides) and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"Sliding attention needs a sliding_window of at least 1, got {self.sliding_window}.")
        if outside := [layer for layer in self.nope_layers or () if not 0 <= layer < depth]:
            raise ValueError(f"nope_layers must be between 0 and {depth - 1}, got {outside[0]}.")
        return slides
