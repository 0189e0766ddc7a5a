"""DDL against the values and gradients that the authors' code computes (tests/golden/ddl)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from transformer2 import Transformer2Config, Transformer2ForCausalLM

GOLDEN = Path(__file__).parent / "golden" / "ddl"
LIMITS = {"stream": 5e-5, "logits": 5e-5, "loss": 5e-6, "grad": 1e-4}
VARIANTS = {
    "dv1": {},
    "cc_noec": {"value_channels": 4},
    "cc": {"value_channels": 4, "expand": True},
    "tc_noec": {"value_channels": 4, "compress": "tokens"},
    "tc": {"value_channels": 4, "compress": "tokens", "expand": True},
}


def read(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["config"])  # noqa: SIM118


def build(name):
    _, golden = read(name)
    return Transformer2ForCausalLM(
        Transformer2Config(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=85,
            num_hidden_layers=3,
            num_attention_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            residual={"type": "ddl", **VARIANTS[name]},
        )
    ).eval()


def fold(read, kernel, tokens):
    """The reference's kernel and read vector -> our compressor weight [taps, d_v, D], differentiably."""
    if tokens:  # kernel [D, d_v, K]
        return torch.einsum("dvk,v->kvd", kernel, read)
    width, before = kernel.shape[1], (kernel.shape[1] - 1) // 2  # kernel [D, K], zero-padded along the channels
    columns = []
    for j in range(len(read)):
        terms = [read[o] * kernel[:, j + before - o] for o in range(len(read)) if 0 <= j + before - o < width]
        columns.append(sum(terms))
    return torch.stack(columns).unsqueeze(0)


def our_weights(name, tensors):
    """Our parameters as differentiable functions of the reference's."""
    tokens = name.startswith("tc")
    weights = {key: tensors[key] for key in tensors if key.startswith("model.")}
    for i in range(3):
        for site in ("attn", "mlp"):
            for theirs, ours in (("beta", "gate"), ("v", "value")):
                for kind in ("weight", "bias"):
                    key = f"model.layers.{i}.{site}_residual.rewrite.{ours}.{kind}"
                    weights[key] = tensors[f"layers.{i}.{site}_ddl.{theirs}.{kind}"]
        if name != "dv1":
            args = tensors[f"layers.{i}.compress.read"], tensors[f"layers.{i}.compress.kernel"]
            weights[f"model.layers.{i}.attn_residual.compress.weight"] = fold(*args, tokens)
    if name != "dv1":
        weights["model.residual.compress.weight"] = fold(tensors["readout.read"], tensors["readout.kernel"], tokens)
    if "expand.kernel" in tensors:
        weights["model.residual.expand.weight"] = tensors["expand.kernel"].permute(2, 1, 0)
    return weights


def error(ours, golden):
    return ((ours - golden).abs().max() / golden.abs().max()).item()


@pytest.mark.parametrize("name", VARIANTS)
def test_values_and_gradients(name):
    tensors, _ = read(name)
    model = build(name)
    leaves = {
        key: value.clone().requires_grad_()
        for key, value in tensors.items()
        if not key.startswith(("out.", "grad.", "derived.", "input_ids"))
    }
    weights = our_weights(name, leaves)
    assert set(weights) | {"lm_head.weight"} == set(model.state_dict())

    streams = {}
    for i, layer in enumerate(model.model.layers):
        for site in ("attn", "mlp"):
            rewrite = getattr(layer, f"{site}_residual").rewrite
            rewrite.register_forward_hook(lambda _, __, out, key=f"layers.{i}.{site}": streams.update({key: out}))
        if i == 0:
            layer.register_forward_pre_hook(lambda _, args: streams.update(embed=args[-1]))

    input_ids = tensors["input_ids"]
    logits = functional_call(model, weights, (input_ids,), {"use_cache": False}, tie_weights=True).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    loss.backward()

    assert error(logits, tensors["out.logits"]) < LIMITS["logits"]
    assert error(loss, tensors["out.loss"]) < LIMITS["loss"]
    golden_streams = {
        key.removeprefix("out.stream."): t for key, t in tensors.items() if key.startswith("out.stream.")
    }
    assert set(golden_streams) == set(streams)
    for key, golden in golden_streams.items():
        ours = streams[key]
        if name != "dv1":
            ours = ours.transpose(-1, -2)  # ours is [B, T, d_v, D]
        assert error(ours.reshape(golden.shape), golden) < LIMITS["stream"], key

    gradients = {key.removeprefix("grad."): t for key, t in tensors.items() if key.startswith("grad.")}
    assert len(gradients) >= 6
    for key, golden in gradients.items():
        assert error(leaves[key].grad, golden) < LIMITS["grad"], key


@pytest.mark.parametrize("name", ["cc", "cc_noec"])
def test_folded_compressor(name):
    """Our single weight is what the reference's kernel and read vector amount to."""
    tensors, _ = read(name)
    for i in range(3):
        ours = fold(tensors[f"layers.{i}.compress.read"], tensors[f"layers.{i}.compress.kernel"], tokens=False)
        torch.testing.assert_close(ours[0].T, tensors[f"derived.layers.{i}.compress.fold"], atol=1e-6, rtol=1e-5)
