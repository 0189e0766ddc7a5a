"""Odd but legitimate ways to call, place and change a model; each was a fault once, or is one of a near relative."""

import copy

import pytest
import torch
from helpers import RESIDUALS, SIZE, case, tokens
from transformers import AutoConfig, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.compat import CACHE_FIELD

SLOTTED = [("standard", "swa"), ("ddl_tc_ec", "none"), ("ddl_cc", "swa_chunk")]


@pytest.mark.parametrize(("residual", "mixer"), [("ddl_tc_ec", "swa"), ("depth_swa", "canon"), ("mudd", "none")])
@pytest.mark.parametrize("on_disk", ["", "model.residual", "model.layers.1"])
@torch.no_grad()
def test_device_map(residual, mixer, on_disk, tmp_path):
    """Parts on disk: modules that layers are handed must not be moved along with their tensors."""
    model = case(residual, mixer)
    model.save_pretrained(tmp_path / "model")
    expected = model(tokens()).logits
    names = [name for name, module in model.model.named_children() if name != "layers"]
    names = [f"model.{n}" for n in names] + [f"model.layers.{i}" for i in range(3)] + ["lm_head"]
    placed = {name: "disk" if on_disk == name or not on_disk else "cpu" for name in names}
    loaded = Transformer2ForCausalLM.from_pretrained(
        tmp_path / "model", device_map=placed, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(loaded(tokens()).logits, expected, atol=0, rtol=0)


@pytest.mark.parametrize(("residual", "mixer"), SLOTTED)
@torch.no_grad()
def test_masks_longer_than_the_chunk(residual, mixer):
    """Chunked prefill may pass the mask of the whole prompt with every chunk."""
    model = case(residual, mixer).double()
    x, mask = tokens(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    full = model(x, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=12)):
        for start, end in ((0, 6), (6, 9), (9, 10)):
            piece = {"position_ids": positions[:, start:end], "cache": cache, "use_cache": True}
            logits = model(x[:, start:end], attention_mask=mask, **piece).logits
            real = mask[:, start:end].bool()
            torch.testing.assert_close(logits[real], full[:, start:end][real], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("residual", "mixer"), SLOTTED)
def test_right_padding_with_a_cache_is_refused(residual, mixer):
    model = case(residual, mixer)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 5:] = 0
    with pytest.raises(ValueError, match="tokenizer.padding_side = 'left'"):
        model(tokens(2, 8), attention_mask=mask, cache=DynamicCache(config=model.config))
    # Who brings no cache is scoring or training, whatever the default of `use_cache`: no cache is made for them.
    out = model(tokens(2, 8), attention_mask=mask, use_cache=True)
    assert out.get(CACHE_FIELD) is None
    assert torch.equal(out.logits, model(tokens(2, 8), attention_mask=mask, use_cache=False).logits)
    with pytest.raises(ValueError, match="8 columns for 9 tokens"):
        model(tokens(2, 9), attention_mask=mask)


@torch.no_grad()
def test_right_padding_without_a_cache_changes_nothing():
    for residual, mixer in SLOTTED:
        model = case(residual, mixer).double()
        x, mask = tokens(1, 8), torch.ones(1, 8, dtype=torch.long)
        mask[0, 5:] = 0
        alone = model(x[:, :5], use_cache=False).logits
        padded = model(x, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(padded[:, :5], alone, atol=1e-10, rtol=1e-10)


def test_masks_that_local_operators_cannot_follow():
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="2-D attention_mask only"):
        case("standard", "swa")(tokens(), attention_mask=mask)
    model = case("ddl", "none")
    torch.testing.assert_close(model(tokens(), attention_mask=mask).logits, model(tokens()).logits)


@pytest.mark.parametrize(("residual", "mixer"), [*SLOTTED, ("standard", "none")])
@torch.no_grad()
def test_packed_rows_of_a_batch(residual, mixer):
    """Rows packed differently, by positions or by `seq_idx` alone, with and without a cache of the model's own."""
    model = case(residual, mixer).double()
    lengths = [[4, 6, 2], [7, 1, 4]]
    documents = [[tokens(1, n, seed=10 * row + n) for n in row_lengths] for row, row_lengths in enumerate(lengths)]
    packed = torch.cat([torch.cat(row, dim=1) for row in documents])
    alone = torch.cat([torch.cat([model(d, use_cache=False).logits for d in row], dim=1) for row in documents])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    seq_idx = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths])
    for use_cache in (False, True):
        out = model(packed, position_ids=positions, use_cache=use_cache).logits
        torch.testing.assert_close(out, alone, atol=1e-10, rtol=1e-10)
    by_index = model(packed, seq_idx=seq_idx, use_cache=False).logits  # RoPE is relative, its tables are float32
    torch.testing.assert_close(by_index, alone, atol=1e-5, rtol=1e-5)


def test_packed_rows_cannot_go_on_from_a_cache():
    model = case("standard", "swa")
    cache = model(tokens(1, 5), use_cache=True)[CACHE_FIELD]
    with pytest.raises(ValueError, match="cannot go on from a cache"):
        model(tokens(1, 4), seq_idx=torch.tensor([[0, 0, 1, 1]]), cache=cache, use_cache=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_half_precision_decoding_is_as_exact_as_prefill(dtype):
    """Large queries and keys, whose products leave float16's range before they are scaled."""
    model = case("standard", "swa", noise=0.0)
    for layer in model.model.layers:
        layer.local_mixer.swa.query.weight.mul_(800)
        layer.local_mixer.swa.key.weight.mul_(800)
    exact = copy.deepcopy(model).double()(tokens(2, 10), use_cache=False).logits
    half = model.to(dtype)
    whole = half(tokens(2, 10), use_cache=False).logits
    cache, pieces = DynamicCache(config=half.config), []
    for position in range(10):
        pieces.append(half(tokens(2, 10)[:, position : position + 1], cache=cache, use_cache=True).logits)
    stepwise = torch.cat(pieces, dim=1)
    assert stepwise.isfinite().all()
    error = [(logits.double() - exact).norm() / exact.norm() for logits in (whole, stepwise)]
    assert error[1] < 1.5 * error[0] + 1e-3


def test_the_configuration_follows_every_assignment(tmp_path):
    config = Transformer2Config(**SIZE, residual=RESIDUALS["ddl_tc_ec"])
    for depth in (5, 2):
        config.num_hidden_layers = depth
        assert config.layer_types == ["hybrid"] * depth
        config.save_pretrained(tmp_path)
        assert Transformer2ForCausalLM(config)(tokens(), use_cache=True).logits.isfinite().all()
    again = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3, residual="standard")
    assert again.layer_types == ["full_attention"] * 3
    config.residual = {}
    assert config.residual == {"type": "standard"}


def test_gates_are_float32_however_the_model_is_made():
    config = Transformer2Config(**SIZE, residual=RESIDUALS["ddl_identity_tc_ec"])
    model = Transformer2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    dtypes = {p.dtype for n, p in model.named_parameters() if "residual" in n}
    assert dtypes == {torch.float32}
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert "attn_residual" in model._keep_in_fp32_modules  # where quantisers look


def test_gates_are_exact_under_autocast():
    """bfloat16 autocast around the model does not round the gates: they equal those computed without it."""
    rewrite = case("ddl", "none").model.layers[0].attn_residual.rewrite
    torch.manual_seed(0)
    state, update, read, context = (torch.randn(2, 3, n, 32).squeeze(2) for n in (1, 1, 1, 1))
    expected = rewrite(state.unsqueeze(-2), update, read, context)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rewrite(state.unsqueeze(-2), update, read, context), expected)


def test_offloading_moves_keys_and_values_only(monkeypatch):
    """States of local operators stay: those after attention still need them in the same layer."""
    cache = case("ddl_tc", "swa")(tokens(), use_cache=True)[CACHE_FIELD]
    layer, moved = cache.layers[0], []
    monkeypatch.setattr(DynamicLayer, "offload", lambda self: moved.append("offload"))
    monkeypatch.setattr(DynamicLayer, "prefetch", lambda self: moved.append("prefetch"))
    states = list(layer.conv_states.values())
    layer.offload()
    layer.prefetch()
    assert moved == ["offload", "prefetch"]
    assert all(a is b for a, b in zip(states, layer.conv_states.values(), strict=True))


def test_the_old_name_of_the_cache():
    model = case("standard", "swa")
    cache = DynamicCache(config=model.config)
    model(tokens(1, 4), cache=cache, use_cache=True)
    if CACHE_FIELD == "cache":
        with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
            old = model(tokens(1, 1), past_key_values=cache, use_cache=True)
    else:
        old = model(tokens(1, 1), past_key_values=cache, use_cache=True)
    assert old[CACHE_FIELD].get_seq_length() == 5
