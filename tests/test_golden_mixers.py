"""Short convolutions and Canon layers against values and gradients of the original code (tests/golden/mixers)."""

import pytest
import torch
import torch.nn.functional as F
from golden_files import GOLDEN, assign, cases
from transformers import DynamicCache

from transformer2 import Transformer2Config
from transformer2.convolution import ShortConvolution
from transformer2.layers import apply_rotary
from transformer2.modeling_transformer2 import Transformer2DecoderLayer
from transformer2.sequence_canon import Canon
from transformer2.sequence_short_conv import ShortConv

FOLDER = GOLDEN / "mixers"
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 11}


def config(width, **fields):
    return Transformer2Config(**{**SIZES, "hidden_size": width, "pad_token_id": None, **fields})


def set_weights(convolution: ShortConvolution, golden, name="weight") -> None:
    assign(convolution, weight=golden[name].T)
    if "bias" in golden.leaves:
        assign(convolution, bias=golden["bias"])


def token_mask(golden):
    return golden["mask"].detach().bool() if "mask" in golden.leaves else None


def decode(mixer, x, pieces):
    """Fed piece by piece through a cache -> the outputs, and the cached tokens after each piece [B, C, K - 1]."""
    cache = DynamicCache(config=config(x.shape[-1], local_mixer="short_conv"))
    outputs, states, start = [], [], 0
    for size in pieces:
        outputs.append(mixer(x[:, start : start + size], cache))
        states.append(cache.layers[0].conv_states[0].clone())
        start += size
    return torch.cat(outputs, dim=1), states


def check_decoding(golden, mixer, apply) -> None:
    rest = [golden.T - golden.prefill] if getattr(golden, "chunked", False) else [1] * (golden.T - golden.prefill)
    y, states = decode(lambda x, cache: apply(x, cache=cache), golden["x"], [golden.prefill, *rest])
    full = apply(golden["x"])
    for ours in (y, full):
        torch.testing.assert_close(ours, golden.out["y"], atol=1e-5, rtol=1e-5)
    for state, name in ((states[0], "state_prefill"), (states[-1], "state_end")):
        kept = golden.kernel - 1  # the reference keeps one more than it needs
        torch.testing.assert_close(state[..., -kept:], golden.out[name][..., -kept:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("golden", cases("shortconv_fla", folder=FOLDER))
def test_short_convolution(golden):
    golden.load(FOLDER)
    mixer = ShortConv(
        config(golden.D),
        0,
        "layer",
        kernel_size=golden.kernel,
        activation=golden.activation,
        bias=golden.bias,
    )
    set_weights(mixer.conv, golden)
    if golden.kind == "decode":
        check_decoding(golden, mixer, mixer)
        return
    seq_idx = None
    if golden.kind == "packed":
        lengths = torch.tensor(golden.cu_seqlens).diff()
        seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        del golden.out["state"]  # a packed row leaves nothing to continue from
    y = mixer(golden["x"], token_mask=token_mask(golden), seq_idx=seq_idx)
    golden.check({"y": y + golden["residual"] if "residual" in golden.leaves else y})


@pytest.mark.parametrize("golden", cases("canon_physicslm4", folder=FOLDER))
def test_canon(golden):
    golden.load(FOLDER)
    mixer = Canon(
        config(golden.D),
        0,
        "attn",
        kernel_size=golden.kernel,
        activation=golden.activation,
        bias=golden.bias,
        skip=golden.residual,
    )
    set_weights(mixer.conv, golden)
    if golden.kind == "decode":
        check_decoding(golden, mixer, mixer.mix)
        return
    mask = token_mask(golden)
    x = golden["x"] if mask is None else golden["x"] * mask.unsqueeze(-1)  # the reference masks its skip as well
    golden.check({"y": mixer.mix(x, token_mask=mask)})


@pytest.mark.parametrize("golden", cases("canon_llama_layer", folder=FOLDER))
def test_where_canon_layers_sit(golden):
    golden.load(FOLDER)
    letters = golden.canon_set
    layer = Transformer2DecoderLayer(
        config(
            golden.D,
            intermediate_size=golden.intermediate,
            num_attention_heads=golden.heads,
            num_key_value_heads=golden.kv_heads,
            head_dim=golden.head_dim,
            rms_norm_eps=golden.rms_norm_eps,
            attn_implementation="eager",
            local_mixer={
                "type": "canon",
                "letters": letters,
                "kernel_size": golden.kernel,
                "activation": golden.activation,
                "skip": golden.residual,
            },
        ),
        0,
    )
    attention, mlp = layer.self_attn, layer.mlp
    mixers = {
        "A": layer.attn_local_mixer,
        "B": attention.local_mixer,
        "C": layer.mlp_local_mixer,
        "D": mlp.local_mixer,
    }
    assert "".join(letter for letter, mixer in mixers.items() if mixer is not None) == letters
    ours = {}
    for letter in letters:
        set_weights(mixers[letter].conv, golden, f"canon{letter}")
        inner, mixer = mixers[letter].mix, mixers[letter]

        def mix(x, inner=inner, letter=letter, **tokens):
            ours[f"canon{letter}.in"], ours[f"canon{letter}.out"] = x, inner(x, **tokens)
            return ours[f"canon{letter}.out"]

        mixer.mix = mix
    for module, name in ((attention, "qkvo"), (mlp, ("gate", "up", "down"))):
        for part in name:
            assign(getattr(module, f"{part}_proj"), weight=golden[f"{part}_proj"])
    assign(layer.input_layernorm, weight=golden["input_layernorm"])
    assign(layer.post_attention_layernorm, weight=golden["post_attention_layernorm"])
    length = golden.T
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    positions = golden["cos"].detach()[None], golden["sin"].detach()[None]
    ours["y"] = layer(golden["x"], attention_mask=mask, position_embeddings=positions)[0]
    golden.check(ours)


def test_the_references_rotation_is_ours():
    x = torch.randn(1, 2, 5, 6)
    angles = torch.randn(1, 5, 6)
    half = torch.cat((-x[..., 3:], x[..., :3]), dim=-1)
    expected = x * angles.cos() + half * angles.sin()
    torch.testing.assert_close(apply_rotary(x, angles.cos(), angles.sin()), expected)
    assert F.silu(torch.zeros(())) == 0
