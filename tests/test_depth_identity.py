"""The identity forms learn from the first step, and the paper forms that are no identity differ by a known amount."""

import re

import pytest
import torch
from helpers import IDENTITY_RESIDUALS, RESIDUALS, is_new, tiny_llama, tiny_model, tokens
from test_llama_parity import retrofit

# Parameters without a gradient at the first step, by the algebra of each variant (and the idle first depth read).
DEAD_AT_FIRST = {
    "ddl_identity_tc_ec": r"\.gate\.0\.",  # the hidden layer of a gate that ends in zeros
    "vertical_identity": r"\.mixture\.logits\.key$",  # keys meet a zero query
    "mudd_prepost": r"\.mixture\.(w1|post_norm)$|\.pre_norm\.weight$",  # W2 = 0, and a sum of zeros
    "attn_res_identity": r"\.mixture\.gain$",  # scales a zero query
    "delta_attn_res_identity": r"\.mixture\.gain$",
    "hyper_identity": r"\.connection\.(read_scale|write_scale|gain)$",  # scale what starts at zero
    "mhc_identity": r"\.connection\.(alpha|mix_bias)$",  # the same, and equal streams that mixing leaves alone
    "dca_window": r"\.mixture\.norm$",  # scales a zero w
    "laurel_all": r"\.augment\.down$",  # B = 0
    "depth_swa_identity": r"\.swa\.(query|key|value)\.weight$",  # behind a zero output projection
}
# Those that never have one: the first sublayer mixes equal streams, after the last only the mean of streams counts.
IDLE = {"mhc_identity": r"layers\.(0\.attn|2\.mlp)_residual\.connection\.mix_bias$"}
NEGLIGIBLE = 1e-6  # of the largest gradient: mHC's rows sum to one up to rounding only


def gradients(model):
    new = {name: parameter for name, parameter in model.named_parameters() if is_new(name)}
    model.zero_grad()
    model(tokens(2, 16), labels=tokens(2, 16), use_cache=False).loss.backward()
    sizes = {name: 0.0 if p.grad is None else p.grad.abs().max().item() for name, p in new.items()}
    largest = max(sizes.values())
    return new, {name for name, size in sizes.items() if size <= NEGLIGIBLE * largest}


@pytest.mark.parametrize("residual", [name for name in IDENTITY_RESIDUALS if name != "standard"])
def test_identity_forms_learn_at_once(residual):
    model = retrofit(tiny_llama(scale=2.0), RESIDUALS[residual], "none", torch.float32).train()
    new, dead = gradients(model)
    expected = {name for name in new if re.search(DEAD_AT_FIRST.get(residual, "nothing"), name)}
    assert dead == expected
    optimizer = torch.optim.AdamW(new.values(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.step()
        new, dead = gradients(model)
    assert dead == {name for name in new if re.search(IDLE.get(residual, "nothing"), name)}


@pytest.mark.parametrize(
    ("residual", "least"),
    [
        ("elc_bert", 0.1),  # a convex combination is n times smaller than the sum, but sublayers add to it
        ("elc_bert_base", 0.1),
        ("vertical", 0.1),  # normalised states instead of a sum
        ("depth_swa", 0.01),  # random projections
        ("ddl", 0.1),  # see depth_ddl.py
        ("ddl_cc", 0.1),
    ],
)
def test_some_paper_forms_are_no_identity(residual, least):
    llama = tiny_llama()
    logits = llama(tokens()).logits
    change = (retrofit(llama, RESIDUALS[residual], "none", torch.float32)(tokens()).logits - logits).abs().max()
    assert change > least * logits.abs().max()


@pytest.mark.parametrize(("residual", "readers"), [("attn_res", "all"), ("hyper", "last")])
def test_a_factor_is_undone_by_the_norms_but_for_their_eps(residual, readers):
    """r / n, or n r, instead of r: RMSNorm(r / n; eps) = RMSNorm(r; n^2 eps). So the difference grows with eps."""
    differences = []
    for eps in (1e-10, 1e-5, 1e-2):
        llama = tiny_llama(rms_norm_eps=eps)
        theirs, ours = llama(tokens()).logits, retrofit(llama, RESIDUALS[residual], "none", torch.float32)(tokens())
        differences.append(((ours.logits - theirs).abs().max() / theirs.abs().max()).item())
    assert differences[0] < 1e-5
    assert differences[0] < differences[1] < differences[2]
    assert differences[2] > 1e-2


def test_attention_residuals_reads_the_mean_at_first():
    """The eps by which the paper form differs is known: with eps / n^2 in every norm it is the plain model again."""
    torch.manual_seed(0)
    model = tiny_model({"type": "attn_res", "block_size": 1}, noise=0.0, rms_norm_eps=1e-2).double()
    plain = tiny_model("standard", noise=0.0, rms_norm_eps=1e-2).double()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if not is_new(name)})
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm.eps /= max(2 * index + 1, 1) ** 2
        layer.post_attention_layernorm.eps /= (2 * index + 2) ** 2
    model.model.norm.eps /= 7**2
    torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits, atol=1e-10, rtol=1e-10)
