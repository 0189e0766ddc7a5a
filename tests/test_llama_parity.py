"""`standard` is Llama, and every identity form starts as Llama, bit for bit."""

import pytest
import torch
from helpers import (
    ALMOST_IDENTITY,
    EXACT_RESIDUALS,
    IDENTITY_MIXERS,
    LOCAL_MIXERS,
    RESIDUALS,
    SIZE,
    is_new,
    tiny_llama,
    tokens,
)
from transformers import (
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

import transformer2
from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.compat import CACHE_FIELD

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
SHAPES = {
    "gqa": {},
    "mqa": {"num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 12},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu"},
    **{f"rope_{name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
}


def retrofit(llama, residual, local_mixer, dtype):
    """Our model with the Llama's weights and new parameters as initialised."""
    fields = {key: value for key, value in llama.config.to_dict().items() if key in Transformer2Config.__annotations__}
    config = Transformer2Config(**fields, residual=residual, local_mixer=local_mixer)
    model = Transformer2ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected
    assert all(is_new(name) for name in missing)
    return model.to(dtype)


def assert_same_function(llama, model, position=300):
    """Bit-equal logits on short, long, left-padded (its real tokens) and cached input."""
    x = tokens(2, 40)
    mask = torch.ones_like(x)
    mask[1, :7] = 0
    with torch.no_grad():
        assert torch.equal(llama(x).logits, model(x).logits)
        long = tokens(1, position)
        assert torch.equal(llama(long).logits, model(long).logits)
        theirs, ours = llama(x, attention_mask=mask).logits, model(x, attention_mask=mask).logits
        assert torch.equal(theirs[mask.bool()], ours[mask.bool()])
        theirs, ours = llama(x[:, :9], use_cache=True), model(x[:, :9], use_cache=True)
        for step in range(9, 14):
            theirs = llama(x[:, step : step + 1], **{CACHE_FIELD: theirs[CACHE_FIELD]}, use_cache=True)
            ours = model(x[:, step : step + 1], cache=ours[CACHE_FIELD], use_cache=True)
            assert torch.equal(theirs.logits, ours.logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_standard_is_llama(shape, dtype):
    llama = tiny_llama(dtype=dtype, **SHAPES[shape])
    model = retrofit(llama, "standard", "none", dtype)
    assert set(model.state_dict()) == set(llama.state_dict())
    assert_same_function(llama, model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_standard_is_llama_for_every_backend(attention):
    llama = tiny_llama(attn_implementation=attention)
    model = retrofit(llama, "standard", "none", torch.float32)
    llama.set_attn_implementation(attention)
    model.set_attn_implementation(attention)
    assert_same_function(llama, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["small", "large"])
@pytest.mark.parametrize(
    ("residual", "mixer"),
    [
        *((residual, mixer) for residual in EXACT_RESIDUALS for mixer in ("none", "swa_identity")),
        *(("standard", mixer) for mixer in IDENTITY_MIXERS if mixer not in ("none", "swa_identity")),
        ("ddl_identity_tc_ec", "canon_identity"),
        ("attn_res_identity", "canon_identity"),
    ],
)
def test_identity_forms_start_as_llama(residual, mixer, scale, dtype):
    llama = tiny_llama(dtype=dtype, scale=scale, head_dim=12, attention_bias=True, mlp_bias=True)
    model = retrofit(llama, RESIDUALS[residual], LOCAL_MIXERS[mixer], dtype)
    assert_same_function(llama, model)


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["small", "large"])
@pytest.mark.parametrize("mixer", ["none", "swa_identity"])
@pytest.mark.parametrize("residual", ALMOST_IDENTITY)
def test_some_start_as_llama_up_to_rounding(residual, mixer, scale):
    llama = tiny_llama(scale=scale, head_dim=12, attention_bias=True, mlp_bias=True)
    model = retrofit(llama, RESIDUALS[residual], LOCAL_MIXERS[mixer], torch.float32)
    theirs, ours = llama(tokens(2, 40)).logits, model(tokens(2, 40)).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8])
def test_every_width_of_the_state_starts_as_llama(channels):
    for dtype in (torch.float32, torch.bfloat16):
        llama = tiny_llama(dtype=dtype)
        residual = {"type": "ddl", "form": "identity", "value_channels": channels}
        model = retrofit(llama, residual, "none", torch.float32)
        values = model.model.layers[0].attn_residual.rewrite.value.weight
        assert channels == 1 or values[1:].abs().min() > 0  # unread channels get different targets
        assert_same_function(llama, model.to(dtype), position=50)


@pytest.mark.parametrize("residual", EXACT_RESIDUALS)
def test_identity_forms_start_as_llama_in_mixed_precision(residual):
    """Under autocast the stream keeps its float32, so nothing is rounded that is not in a Llama."""
    model, plain = (retrofit(tiny_llama(), RESIDUALS[name], "none", torch.float32) for name in (residual, "standard"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens(2, 20)).logits, plain(tokens(2, 20)).logits)


@pytest.mark.parametrize("residual", EXACT_RESIDUALS)
def test_hidden_states_start_as_llamas(residual):
    llama = tiny_llama()
    model = retrofit(llama, RESIDUALS[residual], LOCAL_MIXERS["swa_identity"], torch.float32)
    x = tokens()
    theirs = llama(x, output_hidden_states=True).hidden_states
    ours = model(x, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == SIZE["num_hidden_layers"] + 1
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_a_llama_folder_loads_as_an_identity(llama_folder):
    """`from_pretrained` on a plain Llama with our configuration needs no conversion and changes nothing."""
    fields = {k: v for k, v in LlamaConfig.from_pretrained(llama_folder).to_dict().items() if k in SIZE}
    for residual in EXACT_RESIDUALS:
        config = Transformer2Config(**fields, residual=RESIDUALS[residual], local_mixer=LOCAL_MIXERS["swa_identity"])
        model, info = Transformer2ForCausalLM.from_pretrained(llama_folder, config=config, output_loading_info=True)
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        assert info["missing_keys"]
        assert all(is_new(name) for name in info["missing_keys"])
        assert torch.equal(model(tokens()).logits, tiny_llama()(tokens()).logits)


@pytest.mark.parametrize(
    ("head", "llama_class"),
    [
        ("SequenceClassification", LlamaForSequenceClassification),
        ("TokenClassification", LlamaForTokenClassification),
        ("QuestionAnswering", LlamaForQuestionAnswering),
    ],
)
def test_other_heads_are_llamas(head, llama_class):
    torch.manual_seed(0)
    llama = llama_class(LlamaConfig(**SIZE, num_labels=3)).eval()
    model = getattr(transformer2, f"Transformer2For{head}")(Transformer2Config(**SIZE, num_labels=3)).eval()
    weights = {name.replace("transformer.", "model.", 1): tensor for name, tensor in llama.state_dict().items()}
    model.load_state_dict(weights)
    x = tokens()
    theirs, ours = llama(x), model(x)
    for name in ("logits", "start_logits", "end_logits"):
        if name in theirs:
            assert torch.equal(theirs[name], ours[name])


def test_published_rule_is_reached_by_the_identity_form():
    """carry 0 and erase 1 make the identity form the published rule with linear values."""
    torch.manual_seed(0)
    sizes = {**SIZE, "residual": {"type": "ddl", "form": "paper", "value": "linear"}}
    paper = Transformer2ForCausalLM(Transformer2Config(**sizes)).eval()
    sizes["residual"] = {"type": "ddl", "form": "identity"}
    identity = Transformer2ForCausalLM(Transformer2Config(**sizes)).eval()
    missing, _ = identity.load_state_dict(paper.state_dict(), strict=False)
    assert {name.rpartition(".")[2] for name in missing} == {"carry", "erase"}
    with torch.no_grad():
        for name, parameter in identity.named_parameters():
            if name.endswith((".carry", ".erase")):
                parameter.fill_(float(name.endswith(".erase")))
    torch.testing.assert_close(identity(tokens()).logits, paper(tokens()).logits, atol=1e-6, rtol=1e-5)
