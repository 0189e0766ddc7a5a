"""Transformer2: Llama, with the residual connections and the local mixing left open."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .caches import repair, require_room, without_states
from .compat import CACHE_FIELD, cache_field, takes_either_cache_name
from .configuration_transformer2 import Transformer2Config
from .depth import Stream
from .depth_sources import DepthWeights
from .layers import (
    Transformer2MLP,
    Transformer2RMSNorm,
    Transformer2RotaryEmbedding,
    apply_rotary,
    at_least_float32,
)
from .masks import attention_type, create_masks, is_right_padded
from .outputs import Transformer2CausalLMOutput, Transformer2ModelOutput
from .sequence import LeftContext
from .variants import build_local_mixer, build_residual

logger = logging.get_logger(__name__)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """[B, H, T, d], [B, G, K, d], [B, G, K, d] -> [B, T, H, d] and the weights [B, H, T, K]"""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=at_least_float32(query.dtype)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class Transformer2Attention(nn.Module):
    """Global causal attention with rotary positions and grouped queries, as in Llama and its relatives."""

    def __init__(self, config: Transformer2Config, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.layer_type = attention_type(config, layer_idx)
        self.sliding_window = config.sliding_window if self.layer_type == "sliding_attention" else None
        self.rotates = layer_idx not in (config.nope_layers or ())
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = Transformer2RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Transformer2RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.local_mixer = build_local_mixer(config, layer_idx, "qkv")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        tokens: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, D] (or [3, B, T, D]: one input each for queries, keys and values) -> [B, T, D] and the weights"""
        q_input, k_input, v_input = hidden_states if hidden_states.dim() == 4 else (hidden_states,) * 3
        projected = self.q_proj(q_input), self.k_proj(k_input), self.v_proj(v_input)
        if self.q_norm is not None:
            heads = self.q_norm, self.k_norm
            normed = (
                n(x.unflatten(-1, (-1, self.head_dim))).flatten(-2) for n, x in zip(heads, projected[:2], strict=True)
            )
            projected = (*normed, projected[2])
        if self.local_mixer is not None:
            mixed = self.local_mixer.mix(torch.cat(projected, dim=-1), **(tokens or {}))
            parts = mixed.split([part.shape[-1] for part in projected], dim=-1)
            projected = [part.contiguous() for part in parts]  # kernels round by the layout of their inputs
        input_shape = q_input.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states, key_states, value_states = (part.reshape(hidden_shape).transpose(1, 2) for part in projected)

        if self.rotates:
            cos, sin = position_embeddings
            query_states, key_states = apply_rotary(query_states, cos, sin), apply_rotary(key_states, cos, sin)

        if cache is not None:  # a paged cache changes `kwargs`
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx, kwargs=kwargs)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1).contiguous()), attn_weights


class Transformer2DecoderLayer(GradientCheckpointingLayer):
    """Llama's layer, with the residual connections and the local mixing left open."""

    def __init__(self, config: Transformer2Config, layer_idx: int):
        super().__init__()
        self.self_attn = Transformer2Attention(config, layer_idx)
        self.mlp = Transformer2MLP(config, build_local_mixer(config, layer_idx, "gate_up"))
        self.input_layernorm = Transformer2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Transformer2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

        # Depth axis
        self.attn_residual = build_residual(config, layer_idx, "attn")
        self.mlp_residual = build_residual(config, layer_idx, "mlp")

        # Sequence axis
        self.local_mixer = build_local_mixer(config, layer_idx, "layer")
        if self.local_mixer is not None:
            self.local_layernorm = Transformer2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.local_residual = build_residual(config, layer_idx, "local")
        self.attn_local_mixer = build_local_mixer(config, layer_idx, "attn")
        self.mlp_local_mixer = build_local_mixer(config, layer_idx, "mlp")

    def forward(
        self,
        *stream: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        tokens: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Stream:
        tokens = {**(tokens or {}), "cache": cache}
        local = {name: value for name, value in tokens.items() if name != "model"}  # mixers get no foreign module
        tokens["block"] = self.attn_residual

        # Local Mixing
        if self.local_mixer is not None:
            residual, stream = self.local_residual.read(stream, **tokens)
            hidden_states = self.local_layernorm(residual)
            update = self.local_mixer(hidden_states, **local)
            stream = self.local_residual.write(stream, update, residual, hidden_states, **tokens)

        # Self Attention
        residual, stream = self.attn_residual.read(stream, **tokens)
        hidden_states = self.input_layernorm(residual, self.attn_residual.gain())
        if self.attn_local_mixer is not None:
            hidden_states = self.attn_local_mixer.mix(hidden_states, **local)
        update, _ = self.self_attn(
            hidden_states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            cache=cache,
            tokens=local,
            **kwargs,
        )
        stream = self.attn_residual.write(stream, update, residual, hidden_states, **tokens)

        # Fully Connected
        residual, stream = self.mlp_residual.read(stream, **tokens)
        hidden_states = self.post_attention_layernorm(residual, self.mlp_residual.gain())
        if self.mlp_local_mixer is not None:
            hidden_states = self.mlp_local_mixer.mix(hidden_states, **local)
        update = self.mlp(hidden_states, tokens=local)
        return self.mlp_residual.write(stream, update, residual, hidden_states, **tokens)


class Transformer2PreTrainedModel(PreTrainedModel):
    config: Transformer2Config
    config_class = Transformer2Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Transformer2DecoderLayer"]
    # Not `model` and `block` either, modules in `tokens`: accelerate's hooks would move them to the layer's device.
    _skip_keys_device_placement = [CACHE_FIELD, "model", "block"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": Transformer2DecoderLayer,
        "attentions": Transformer2Attention,
        "depth_weights": DepthWeights,
    }

    def _init_weights(self, module: nn.Module) -> None:
        if type(module).__module__.startswith("torch.") or not hasattr(module, "reset_parameters"):
            super()._init_weights(module)
        else:  # one of ours: it knows how it starts
            module.reset_parameters()

    def save_pretrained(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """As in the base class; a checkpoint that carries its code lists every head, whichever one is saved."""
        if self.is_remote_code():
            module = type(self).__module__.rpartition(".")[-1]
            heads = {auto_class: f"{module}.{name}" for auto_class, name in AUTO_MAP.items()}
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **heads}
        super().save_pretrained(save_directory, *args, **kwargs)


class Transformer2Model(Transformer2PreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: Transformer2Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.local_mixer = build_local_mixer(config, 0, "embedding")
        self.residual = build_residual(config, config.num_hidden_layers, "model")
        self.layers = nn.ModuleList(
            [Transformer2DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = Transformer2RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Transformer2RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self._keep_in_float32(self.residual.keep_in_float32)
        self._number_left_contexts()
        self.post_init()

    def _keep_in_float32(self, names: tuple[str, ...]) -> None:
        """Modules of these names stay float32 in a half-precision model, however it is made, and unquantised."""
        modules = {name: module for name, module in self.named_modules() if name.rpartition(".")[2] in names}
        present = {name.rpartition(".")[2] for name, module in modules.items() if list(module.parameters())}
        # Both: bfloat16 needs the strict list, quantisers look at the other one only.
        self._keep_in_fp32_modules, self._keep_in_fp32_modules_strict = set(present), set(present)
        for module in modules.values():
            for parameter in module.parameters():
                parameter.data = parameter.data.to(at_least_float32(parameter.dtype))

    def _number_left_contexts(self) -> None:
        """Give every `LeftContext` a slot of its own in its layer's row of the cache."""
        slots = [0] * self.config.num_hidden_layers
        for module in self.modules():
            if isinstance(module, LeftContext) and module.size > 0:
                module.slot = slots[module.layer_idx]
                slots[module.layer_idx] += 1

    @takes_either_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Transformer2ModelOutput:
        """input_ids [B, T] (or inputs_embeds [B, T, D]) -> last_hidden_state [B, T, D], with the cache.

        attention_mask [B, past + T] marks padding with 0, and may be what `create_masks_for_generate` returned. Rows
        that pack several documents say so by `position_ids` that start again (without a mask), or by `seq_idx`
        [B, T], the number of each token's document. output_depth_weights=True returns what the residuals weighted
        earlier states by, one tensor per read, see `DepthWeights`.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.shape[1] == 0:
            raise ValueError("There are no tokens: give at least one, such as the beginning-of-text token.")
        makes_cache = use_cache and cache is None and self.config.number_of_conv_states and not is_compiling()
        if makes_cache and is_right_padded(attention_mask):  # scoring and training need none
            use_cache = False
            logger.warning_once("No cache is returned for a batch with padding on the right; pad on the left.")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
            if seq_idx is None and attention_mask is None and position_ids is not None and not is_compiling():
                seq_idx = find_packed_sequence_indices(position_ids)  # packed rows stay apart in a new cache, too
        repair(cache, self.config)
        if not is_compiling() and inputs_embeds.device.type == "cpu":  # elsewhere it would wait for the device
            require_room(cache, self.config, inputs_embeds.shape[1])
        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        masks = attention_mask
        if not isinstance(masks, dict):
            masks = create_masks(self.config, inputs_embeds, attention_mask, cache, position_ids, seq_idx, **kwargs)
        tokens = {name: mask for name, mask in masks.items() if not name.endswith("_attention")}
        tokens["position_ids"] = position_ids
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        if self.local_mixer is not None:
            inputs_embeds = self.local_mixer.mix(inputs_embeds, cache=cache, **tokens)
        tokens["model"] = self.residual
        stream = self.residual.open(inputs_embeds, cache=cache, **tokens)
        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            stream = decoder_layer(
                *stream,
                attention_mask=masks[decoder_layer.self_attn.layer_type],
                position_embeddings=position_embeddings,
                cache=cache,
                tokens=tokens,
                position_ids=position_ids,
                **kwargs,
            )
        hidden_states = self.norm(self.residual.close(stream, cache=cache, **tokens))
        return Transformer2ModelOutput(last_hidden_state=hidden_states, **cache_field(cache))


class Transformer2ForCausalLM(Transformer2PreTrainedModel, GenerationMixin):
    """The decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: Transformer2Config):
        super().__init__(config)
        self.model = Transformer2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Transformer2CausalLMOutput:
        """As `Transformer2Model.forward` -> logits [B, T, vocabulary], and the loss where `labels` [B, T] are given.

        labels: token ids, -100 where there is no target; they are shifted here. logits_to_keep: only the last so many
        logits, or those at the given indices (0: all of them).
        """
        outputs: Transformer2ModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return Transformer2CausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            depth_weights=outputs.depth_weights,
            **cache_field(outputs.get(CACHE_FIELD)),
        )

    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, cache=None, position_ids=None, **kwargs):
        """What `generate` hands to a compiled `forward` in place of the 2-D mask."""
        cache = kwargs.pop("past_key_values", None) if cache is None else cache
        return create_masks(config, inputs_embeds, attention_mask, cache, position_ids)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ):
        if generation_config.cache_implementation == "quantized":  # the library's refuses layers with other states
            options = {"config": without_states(self.config), **(generation_config.cache_config or {})}
            generation_config = copy.copy(generation_config)
            generation_config.cache_config = options
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        repair(model_kwargs.get(CACHE_FIELD), self.config)

    def init_continuous_batching(self, *args: Any, **kwargs: Any):
        """As in the library. Raises ValueError where the cache would have to hold more than keys and values.

        And RuntimeError on versions of transformers whose attention functions fill the cache themselves.
        """
        if CACHE_FIELD != "cache":
            raise RuntimeError("Continuous batching needs transformers 5.24 or newer: use generate.")
        if self.config.number_of_conv_states:
            raise ValueError(
                "Continuous batching keeps keys and values only, but the local mixer or residual of this model has "
                "states of its own: use generate."
            )
        return super().init_continuous_batching(*args, **kwargs)


# The generic heads bring their forward passes. They would build the decoder through AutoModel, which asks for trust
# once more when this file itself is remote code, so the parts are built here.
class Transformer2ForSequenceClassification(GenericForSequenceClassification, Transformer2PreTrainedModel):
    """The decoder with a classification head on the last token."""

    def __init__(self, config: Transformer2Config):
        Transformer2PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = Transformer2Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class Transformer2ForTokenClassification(GenericForTokenClassification, Transformer2PreTrainedModel):
    """The decoder with a classification head on every token."""

    def __init__(self, config: Transformer2Config):
        Transformer2PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = Transformer2Model(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class Transformer2ForQuestionAnswering(GenericForQuestionAnswering, Transformer2PreTrainedModel):
    """The decoder with a head for the start and the end of an answer."""

    def __init__(self, config: Transformer2Config):
        Transformer2PreTrainedModel.__init__(self, config)
        self.model = Transformer2Model(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


AUTO_MAP = {
    "AutoModel": "Transformer2Model",
    "AutoModelForCausalLM": "Transformer2ForCausalLM",
    "AutoModelForSequenceClassification": "Transformer2ForSequenceClassification",
    "AutoModelForTokenClassification": "Transformer2ForTokenClassification",
    "AutoModelForQuestionAnswering": "Transformer2ForQuestionAnswering",
}
