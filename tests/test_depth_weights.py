"""`output_depth_weights=True`: what every read weighted its sources by."""

import pytest
import torch
from helpers import RESIDUALS, case, tiny_model, tokens

# Reads per model of three layers, and the groups and sources of the last of them, known from the papers.
EXPECTED = {
    "elc_bert": (3, (1, 4)),  # layers 2 and 3, and the end
    "denseformer": (3, (1, 4)),
    "denseformer_2x1": (3, (1, 2)),
    "vertical": (3, (1, 4)),
    "dca": (4, (1, 4)),
    "dca_window": (4, (1, 3)),
    "mudd": (3, (1, 4)),
    "attn_res": (6, (1, 4)),
    "attn_res_identity": (6, (2, 3)),
    "attn_res_full": (5, (4, 6)),
    "delta_attn_res": (5, (1, 6)),
    "depth_swa": (3, (1, 2)),
    "depth_swa_layers": (3, (2, 3)),
    "hyper": (6, (1, 4)),
    "mhc_identity": (6, (1, 3)),
    "ddl": (6, (3, 1)),
    "ddl_cc": (6, (3, 4)),
    "laurel_all": (5, (1, 3)),
}


@pytest.mark.parametrize("residual", EXPECTED)
def test_every_read_is_recorded(residual):
    model = case(residual, "none")
    assert model(tokens()).depth_weights is None
    reads, last = EXPECTED[residual]
    for outputs in (model(tokens(), output_depth_weights=True), model.model(tokens(), output_depth_weights=True)):
        assert len(outputs.depth_weights) == reads
        assert tuple(outputs.depth_weights[-1].shape[:2]) == last
        for weights in outputs.depth_weights:
            assert weights.dim() == 4
            assert weights.isfinite().all()
            assert tuple(torch.broadcast_shapes(weights.shape[2:], (2, 12))) == (2, 12)


def test_standard_has_none():
    assert tiny_model()(tokens(), output_depth_weights=True).depth_weights == ()


@pytest.mark.parametrize(
    "residual", ["elc_bert", "vertical", "attn_res", "attn_res_full", "depth_swa", "mhc_identity"]
)
def test_shares_sum_to_one(residual):
    for weights in case(residual, "none", noise=0.0)(tokens(), output_depth_weights=True).depth_weights:
        torch.testing.assert_close(weights.sum(1), torch.ones_like(weights.sum(1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("residual", ["denseformer", "mudd", "hyper"])
def test_plain_starts_are_one_hot(residual):
    model = case(residual, "none", noise=0.0)
    for weights in model(tokens(), output_depth_weights=True).depth_weights:
        assert set(weights.unique().tolist()) == {0.0, 1.0}
        assert torch.equal(weights.sum(1), torch.ones_like(weights.sum(1)))


def test_weights_reproduce_the_read():
    """Applied by hand, the recorded weights give what attention reads."""
    model = case("denseformer", "none").double()
    states, reads = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        layer.input_layernorm.register_forward_pre_hook(lambda _, args: reads.append(args[0]))
    recorded = model(tokens(), output_depth_weights=True).depth_weights
    for layer in (1, 2):
        by_hand = sum(w * x for w, x in zip(recorded[layer - 1][0], states[: layer + 1], strict=True))
        torch.testing.assert_close(reads[layer], by_hand, atol=1e-12, rtol=1e-12)


def test_ddl_records_gate_write_and_erase():
    """At the identity start every sublayer writes its output once and erases nothing; afterwards, the rule itself."""
    for weights in case("ddl_identity", "none", noise=0.0)(tokens(), output_depth_weights=True).depth_weights:
        assert torch.equal(weights[:2], torch.ones_like(weights[:2]))
        assert not weights[2].any()
    model = case("ddl", "none").double()
    calls = []
    rewrite = model.model.layers[0].attn_residual.rewrite
    rewrite.register_forward_hook(lambda _, args, out: calls.append((args, out)))
    gate, written, erased = model(tokens(), output_depth_weights=True).depth_weights[0]
    (state, update, read, context), out = calls[0]
    norm = (update.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    k = update / norm
    beta = 2 * torch.sigmoid(context @ rewrite.gate.weight.T + rewrite.gate.bias)
    value = 4 * torch.sigmoid(read @ rewrite.value.weight.T + rewrite.value.bias)
    torch.testing.assert_close(gate[0], beta[..., 0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(written[0], (beta * value / norm)[..., 0], atol=1e-12, rtol=1e-12)
    erasing = beta * (k * state[..., 0, :]).sum(-1, keepdim=True) / norm
    torch.testing.assert_close(erased[0], erasing[..., 0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(out, state + ((written - erased)[0, ..., None] * update)[..., None, :])


@pytest.mark.parametrize("residual", ["attn_res", "mudd", "ddl", "depth_swa"])
def test_survives_compilation(residual):
    torch._dynamo.reset()
    model = case(residual, "none")
    eager = model(tokens(), output_depth_weights=True).depth_weights
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    graph = compiled(tokens(), output_depth_weights=True).depth_weights
    assert len(eager) == len(graph) > 0
    for a, b in zip(eager, graph, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_every_residual_is_covered_here():
    kinds = {RESIDUALS[name]["type"] if isinstance(RESIDUALS[name], dict) else RESIDUALS[name] for name in EXPECTED}
    from transformer2 import RESIDUALS as MENU

    assert kinds == MENU.keys() - {"standard"}
