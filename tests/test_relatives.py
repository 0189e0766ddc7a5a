"""The backbone admits Llama's relatives: Mistral, Qwen2, Qwen3 and SmolLM3, bit for bit."""

import pytest
import torch
from helpers import EXACT_RESIDUALS, IDENTITY_MIXERS, LOCAL_MIXERS, RESIDUALS, SIZE, is_new
from test_llama_parity import assert_same_function
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from transformer2 import Transformer2Config, Transformer2ForCausalLM

# The class, the fields of its configuration, and those that ours needs besides the common ones.
RELATIVES = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}, {}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"attention_bias": True, "attention_output_bias": False}),
    "qwen2_sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        {"attention_bias": True, "attention_output_bias": False},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}, {"qk_norm": True}),
    "qwen3_biases": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "attention_bias": True}, {"qk_norm": True}),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}, {"nope_layers": [1]}),
    "smollm3_sliding": (
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 6, "mlp_bias": True},
        {"nope_layers": [0]},
    ),
}


def relative(name: str, dtype: torch.dtype):
    """The original with random weights, and ours with the same."""
    model_class, config_class, fields, ours = RELATIVES[name]
    torch.manual_seed(0)
    theirs = model_class(config_class(**{**SIZE, "eos_token_id": 2, "bos_token_id": 1, **fields})).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(3.0).add_(0.1 * torch.randn_like(parameter))
    return theirs.to(dtype), ours


def ours_from(theirs, fields, residual="standard", local_mixer="none"):
    common = {
        key: value for key, value in theirs.config.to_dict().items() if key in Transformer2Config.__annotations__
    }
    config = Transformer2Config(**{**common, **fields}, residual=residual, local_mixer=local_mixer)
    model = Transformer2ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all(is_new(name) for name in missing)
    return model.to(theirs.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RELATIVES)
def test_standard_is_the_relative(name, dtype):
    theirs, fields = relative(name, dtype)
    model = ours_from(theirs, fields)
    assert set(model.state_dict()) == set(theirs.state_dict())
    assert_same_function(theirs, model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["qwen2_sliding", "qwen3"])
def test_every_backend(name, attention):
    theirs, fields = relative(name, torch.float32)
    model = ours_from(theirs, fields)
    theirs.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    assert_same_function(theirs, model)


@pytest.mark.parametrize("name", ["mistral_sliding", "qwen2_sliding", "qwen3", "smollm3"])
@pytest.mark.parametrize(
    ("residual", "mixer"),
    [
        ("ddl_identity_tc_ec", "canon_identity"),
        ("attn_res_identity", "swa_identity"),
        ("mudd_static", "conv_identity"),
    ],
)
def test_identity_forms_start_as_the_relative(name, residual, mixer):
    assert residual in EXACT_RESIDUALS
    assert mixer in IDENTITY_MIXERS
    for dtype in (torch.float32, torch.bfloat16):
        theirs, fields = relative(name, dtype)
        assert_same_function(theirs, ours_from(theirs, fields, RESIDUALS[residual], LOCAL_MIXERS[mixer]))
