"""Every depth variant against a naive reference written from its paper (naive_depth.py): logits and all gradients.

The models are perturbed: nothing is at its start, where most options make no difference.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import tiny_model, tokens
from naive_depth import REFERENCES
from torch import Tensor

FORMS = ("paper", "identity")
LOCAL = {"type": "short_swa", "window": 4}


def rows(kind: str, *options: dict) -> list[dict]:
    return [{"type": kind, **row} for row in options]


CASES: list[dict] = [
    *rows("elc_bert", {}, {"start": "last"}, {"mlp_reads": "attention"}, {"normalize": True}, {"final_read": False}),
    *rows("elc_bert", {"form": "identity"}, {"form": "identity", "start": "uniform", "mlp_reads": "sum"}),
    *rows("denseformer", {}, {"dilation": 2}, {"period": 2}, {"dilation": 2, "period": 3}),
    *rows("denseformer", {"dilation": 3, "period": 2}, {"form": "identity", "dilation": 2, "period": 5}),
    *rows("vertical_attention", *({"form": form, "weights": "static"} for form in FORMS)),
    *rows("vertical_attention", *({"form": form, "weights": "qk"} for form in FORMS), {"key_dim": 8}),
    *rows("dca", *({"grn": grn, "window": window} for grn in ("v1", "v2", "v3") for window in (None, 1, 2))),
    *rows("dca", *({"activation": activation} for activation in ("gelu", "relu", "silu")), {"form": "identity"}),
    *rows("dca", {"split_qkv": False}, {"key_norm": True}, {"split_qkv": False, "key_norm": True, "window": 2}),
    *rows("mudd", {}, {"form": "identity"}, {"dynamic": False}, {"separate_norms": False}),
    *rows("mudd", {"prepost_norm": True}, {"prepost_norm": True, "dynamic": False, "separate_norms": False}),
    *rows("mudd", {"expand_last": True}, {"round64": True}, {"expand_last": True, "round64": True}),
    *(
        {"type": kind, "form": form, **options}
        for kind in ("attn_res", "delta_attn_res")
        for form in FORMS
        for options in (
            *({"block_size": size} for size in (None, 1, 2, 4, 6)),
            *({"num_heads": 4}, {"num_heads": 2, "block_size": 1}, {"key_norm": False}),
            *({"final_read": True}, {"final_read": False}),
        )
    ),
    *rows("hyper_connections", {}, {"form": "identity"}, {"dynamic": False}, {"tanh": False}, {"num_streams": 2}),
    *rows("hyper_connections", {"reduce": "sum"}, {"reduce": "mean"}, {"scale_start": 0.5}, {"num_streams": 1}),
    *rows("mhc", {}, {"form": "identity"}, {"num_streams": 2}, {"sinkhorn_iters": 1}, {"sinkhorn_iters": 3}),
    *rows("mhc", {"sinkhorn_eps": 1e-2}, {"reduce": "sum"}, {"start": "symmetric"}, {"alpha_start": 1.0}),
    *rows("laurel", {}, {"form": "identity"}, {"weighted": False}, {"rank": 0}, {"rank": 4, "previous": 3}),
    *rows("laurel", {"rank": 0, "weighted": False, "previous": 2}, {"previous": 10}),
    *({"type": "short_swa", "form": form, "share_weights": share} for form in FORMS for share in (True, False)),
    *rows("short_swa", {"window": 1}, {"window": 2}, {"window": None}, {"norm": False}, {"num_heads": 2}),
    *rows("short_swa", {"num_heads": 4, "head_dim": 6, "window": None, "share_weights": False, "norm": False}),
]
WITH_LOCAL: list[dict] = [
    *({"type": "elc_bert", "form": form} for form in FORMS),
    *rows("elc_bert", {"normalize": True, "mlp_reads": "attention", "final_read": False}),
    *({"type": kind, "form": form, "block_size": 2} for kind in ("attn_res", "delta_attn_res") for form in FORMS),
    *rows("attn_res", {"block_size": 1}, {"block_size": 4}),
    *rows("denseformer", {}, {"dilation": 2, "period": 2}),
    *rows("dca", {}, {"window": 1}),
    *rows("mudd", {}, {"prepost_norm": True}),
    *({"type": "vertical_attention", "form": form} for form in FORMS),
    *({"type": kind} for kind in ("hyper_connections", "mhc", "laurel", "short_swa")),
    *rows("laurel", {"previous": 2}),
]
# Deeper, where the number of layers decides: blocks of 4 for 18 sublayers; 4 (15 + 1) is a multiple of 64 as it is.
DEEPER: list[tuple[dict, dict]] = [
    ({"type": "attn_res"}, {"num_hidden_layers": 9}),
    ({"type": "mudd", "expand_last": True, "round64": True}, {"num_hidden_layers": 15, "noise": 0.1}),
]


def name(row: Any) -> str | None:
    return "-".join(str(value) for value in row.values()) if isinstance(row, dict) else None


def model_of(residual: dict, local_mixer: Any = "none", **arguments: Any):
    """A model in float64 whose every weight matters: larger than at initialisation, norms included."""
    model = tiny_model(residual, local_mixer, **{"num_hidden_layers": 5, "initializer_range": 0.15, **arguments})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "layernorm" in parameter_name or parameter_name == "model.norm.weight":
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double()


def leaves(model) -> dict[str, Tensor]:
    """The model's parameters, with gradients of their own."""
    return {key: parameter.detach().clone().requires_grad_() for key, parameter in model.named_parameters()}


def reference(model, parameters: dict[str, Tensor], ids: Tensor, **changes: Any) -> Tensor:
    """Logits of the naive reference, given nothing of the model but its parameters and its configuration."""
    config = model.config
    sizes = {
        "layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "eps": config.rms_norm_eps,
        "theta": config.rope_parameters["rope_theta"],
        "local_mixer": changes.pop("local_mixer", config.local_mixer),
    }
    return REFERENCES[config.residual["type"]](parameters, sizes, {**config.residual, **changes}, ids)


def check(model) -> None:
    ids, parameters = tokens(2, 6), leaves(model)
    logits, expected = model(ids).logits, reference(model, parameters, ids)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=1e-9)

    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for key, parameter in model.named_parameters():
        gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in (parameter, parameters[key])]
        torch.testing.assert_close(*gradients, atol=1e-8, rtol=1e-8, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("residual", CASES, ids=name)
def test_model_is_the_reference(residual):
    check(model_of(residual))


@pytest.mark.parametrize("residual", WITH_LOCAL, ids=name)
def test_model_with_local_sublayer_is_the_reference(residual):
    check(model_of(residual, LOCAL))


@pytest.mark.parametrize(("residual", "arguments"), DEEPER, ids=name)
def test_deeper_model_is_the_reference(residual, arguments):
    check(model_of(residual, **arguments))


zero = torch.zeros_like


def one_dropped(x: Tensor) -> Tensor:
    return torch.cat((zero(x[..., :1]), x[..., 1:]), dim=-1)


def first_of_all(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


def transposed(read_and_mix: Tensor) -> Tensor:
    return torch.cat((read_and_mix[:, :1], read_and_mix[:, 1:].T), dim=1)


# What the reference gets wrong: options, and parameters (a pattern of their names, and what becomes of them).
MISTAKES: list[tuple[dict, dict, tuple[str, Callable] | None]] = [
    ({"type": "elc_bert"}, {}, ("score", zero)),  # uniform weights
    ({"type": "elc_bert"}, {}, ("score", lambda x: x.flip(0))),  # newest first
    ({"type": "elc_bert"}, {"form": "identity"}, None),
    ({"type": "elc_bert"}, {"final_read": False}, None),
    ({"type": "elc_bert", "mlp_reads": "attention"}, {"mlp_reads": "sum"}, None),
    ({"type": "elc_bert", "normalize": True}, {"normalize": False}, None),
    ({"type": "elc_bert", "form": "identity"}, {"form": "paper"}, None),
    ({"type": "denseformer", "dilation": 3, "period": 3}, {"dilation": 2}, None),
    ({"type": "denseformer", "dilation": 2, "period": 1}, {"period": 2}, None),
    ({"type": "denseformer"}, {}, ("alpha", one_dropped)),
    ({"type": "vertical_attention", "weights": "static"}, {}, ("score", zero)),
    ({"type": "vertical_attention"}, {}, ("query", zero)),
    ({"type": "vertical_attention"}, {"key_dim": 32}, None),
    ({"type": "vertical_attention"}, {"form": "identity"}, None),
    ({"type": "vertical_attention", "form": "identity"}, {"form": "paper"}, None),
    ({"type": "dca"}, {"activation": "relu"}, None),
    ({"type": "dca"}, {"activation": "silu"}, None),
    ({"type": "dca"}, {"grn": "v2"}, None),
    ({"type": "dca"}, {}, (r"\.b$", torch.ones_like)),
    ({"type": "dca"}, {}, (r"\.b$", first_of_all)),  # keys and values read the queries' sum
    ({"type": "dca"}, {}, ("gains", torch.ones_like)),
    ({"type": "dca", "grn": "v1"}, {}, (r"\.b$", lambda x: x.flip(1))),  # newest first
    ({"type": "dca", "window": 1}, {}, (r"\.b$", lambda x: x.flip(1))),
    ({"type": "dca", "key_norm": True}, {"key_norm": False}, None),
    ({"type": "mudd"}, {"dynamic": False}, None),
    ({"type": "mudd"}, {}, ("static", one_dropped)),
    ({"type": "mudd"}, {}, ("static", first_of_all)),
    ({"type": "mudd"}, {}, ("w2", lambda x: x.flip(0))),
    ({"type": "mudd"}, {}, ("gains", torch.ones_like)),
    ({"type": "mudd", "prepost_norm": True}, {"prepost_norm": False}, None),
    ({"type": "mudd", "prepost_norm": True}, {}, ("post_norm", torch.ones_like)),
    *(
        (options, change, parameters)
        for kind in ("attn_res", "delta_attn_res")
        for options, change, parameters in (
            ({"type": kind}, {}, ("query", zero)),
            ({"type": kind}, {}, ("gain", torch.ones_like)),
            ({"type": kind}, {"key_norm": False}, None),
            ({"type": kind, "final_read": True}, {"final_read": False}, None),
            ({"type": kind, "num_heads": 4}, {"num_heads": 1}, None),
            ({"type": kind, "block_size": 2}, {"block_size": 1}, None),
            ({"type": kind, "block_size": 4}, {"block_size": 6}, None),
            ({"type": kind, "form": "identity", "block_size": 6}, {"block_size": None}, None),
        )
    ),
    ({"type": "delta_attn_res"}, {"form": "identity"}, None),
    ({"type": "hyper_connections"}, {"dynamic": False}, None),
    ({"type": "hyper_connections"}, {"tanh": False}, None),
    ({"type": "hyper_connections"}, {}, ("gain", torch.ones_like)),
    ({"type": "hyper_connections"}, {}, (r"\.read_and_mix$", transposed)),
    ({"type": "hyper_connections"}, {}, (r"connection\.write$", one_dropped)),
    ({"type": "mhc"}, {"sinkhorn_iters": 1}, None),
    ({"type": "mhc"}, {"sinkhorn_eps": 1e-2}, None),
    ({"type": "mhc"}, {}, ("mix_bias", lambda x: x.T)),
    ({"type": "mhc"}, {}, ("read_bias", zero)),
    ({"type": "mhc"}, {}, ("phi", zero)),
    ({"type": "laurel"}, {"weighted": False}, None),
    ({"type": "laurel"}, {"rank": 0}, None),
    ({"type": "laurel", "previous": 3}, {"previous": 2}, None),
    ({"type": "laurel", "previous": 3}, {}, ("earlier", lambda x: x.flip(0))),
    ({"type": "short_swa"}, {"window": 3}, None),
    ({"type": "short_swa", "window": None}, {"window": 4}, None),
    ({"type": "short_swa"}, {"norm": False}, None),
    ({"type": "short_swa"}, {"num_heads": 2}, None),
    ({"type": "short_swa"}, {}, (r"mixture\.swa\.query", zero)),  # uniform weights
]
LOCAL_MISTAKES: list[tuple[dict, dict, tuple[str, Callable] | None]] = [
    *(
        ({"type": kind}, {"local_mixer": {"type": "none"}}, None)
        for kind in ("elc_bert", "denseformer", "dca", "mudd", "attn_res", "hyper_connections")
    ),
    ({"type": "elc_bert"}, {"local_mixer": {**LOCAL, "window": 3}}, None),
    ({"type": "attn_res"}, {"local_mixer": {**LOCAL, "window": 5}}, None),
]
# A factor on all that a norm reads: the norm undoes it but for its eps, so that has to be large.
MISTAKES_BEHIND_A_NORM: list[tuple[dict, dict]] = [
    ({"type": "attn_res"}, {"form": "identity"}),
    ({"type": "hyper_connections"}, {"reduce": "mean"}),
    ({"type": "mhc"}, {"reduce": "sum"}),
]


def difference(model, changes: dict, parameters: tuple[str, Callable] | None) -> float:
    ids, changed = tokens(2, 6), leaves(model)
    if parameters is not None:
        pattern, change = parameters
        matching = [key for key in changed if re.search(pattern, key)]
        assert matching, f"no parameter matches {pattern}"
        changed.update({key: change(changed[key]) for key in matching})
    with torch.no_grad():
        return (model(ids).logits - reference(model, changed, ids, **changes)).abs().max().item()


@pytest.mark.parametrize(("residual", "changes", "parameters"), MISTAKES, ids=name)
def test_mistakes_show(residual, changes, parameters):
    assert difference(model_of(residual), changes, parameters) > 1e-3


@pytest.mark.parametrize(("residual", "changes", "parameters"), LOCAL_MISTAKES, ids=name)
def test_mistakes_of_the_local_sublayer_show(residual, changes, parameters):
    assert difference(model_of(residual, LOCAL), changes, parameters) > 1e-3


@pytest.mark.parametrize(("residual", "changes"), MISTAKES_BEHIND_A_NORM, ids=name)
def test_mistakes_behind_a_norm_show(residual, changes):
    assert difference(model_of(residual, rms_norm_eps=1e-2), changes, None) > 1e-3


STARTS: list[tuple[dict, str, list[float]]] = [
    ({"type": "elc_bert"}, "layers.2.attn_residual.mixture.score", [0, 0, 0]),
    ({"type": "elc_bert", "start": "last"}, "layers.2.attn_residual.mixture.score", [0, 0, 1]),
    ({"type": "elc_bert", "start": "last"}, "residual.mixture.score", [0, 0, 0, 0, 0, 1]),
    ({"type": "hyper_connections"}, "layers.1.mlp_residual.connection.read_scale", [0.01]),
    ({"type": "hyper_connections", "scale_start": 0.5}, "layers.1.mlp_residual.connection.read_scale", [0.5]),
    ({"type": "hyper_connections", "scale_start": 0.5}, "layers.1.mlp_residual.connection.write_scale", [0.5]),
    ({"type": "mhc"}, "layers.0.attn_residual.connection.alpha", [0.01, 0.01, 0.01]),
    ({"type": "mhc", "alpha_start": 1.0}, "layers.0.attn_residual.connection.alpha", [1, 1, 1]),
]


@pytest.mark.parametrize(("residual", "key", "expected"), STARTS, ids=name)
def test_options_that_only_set_the_start(residual, key, expected):
    start = model_of(residual, noise=0.0).get_parameter(f"model.{key}")
    torch.testing.assert_close(start, torch.tensor(expected).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("start", "shares"), [("skew", [0.1, 0.1, 0.1, 0.7]), ("symmetric", [0.25] * 4)])
def test_start_of_mhc_reads(start, shares):
    """The skewed start favours each stream in turn, sublayer by sublayer."""
    model, favourites = model_of({"type": "mhc", "start": start}, noise=0.0), []
    for layer in model.model.layers:
        for residual in (layer.attn_residual, layer.mlp_residual):
            pre = residual.connection.read_bias.sigmoid()
            torch.testing.assert_close(pre.sort().values, torch.tensor(shares).double(), atol=1e-6, rtol=0)
            favourites.append(int(pre.argmax()))
    assert start == "symmetric" or favourites == [i % 4 for i in range(10)]
