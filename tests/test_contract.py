"""What every variant promises, on tiny models whose new parameters are all perturbed. One row of `CASES` per model."""

import copy
import math
import re

import pytest
import torch
from helpers import CASES, PAIRS, SIZE, case, is_new, tokens
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer

from transformer2 import Transformer2ForCausalLM, Transformer2Model
from transformer2.caches import repair
from transformer2.compat import CACHE_FIELD
from transformer2.depth import Residual
from transformer2.variants import RESIDUALS as RESIDUAL_CLASSES

every_case = pytest.mark.parametrize(("residual", "mixer"), CASES, ids=["-".join(names) for names in CASES])
every_pair = pytest.mark.parametrize(("residual", "mixer"), PAIRS, ids=["-".join(names) for names in PAIRS])


def idle_patterns(model):
    options = dict(model.config.residual)
    return RESIDUAL_CLASSES[options.pop("type")].idle(model.config, **options)


@every_case
def test_all_parameters_learn(residual, mixer):
    model = case(residual, mixer).train()
    model(tokens(), labels=tokens()).loss.backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert all(any(re.search(pattern, name) for pattern in idle_patterns(model)) for name in dead)


@every_case
def test_gradient_checkpointing_changes_no_gradient(residual, mixer):
    gradients = []
    for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        model = case(residual, mixer).double().train()
        if options is not None:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(options)
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradient, other[name], atol=1e-12, rtol=1e-10, msg=name)


@every_case
def test_compiles_as_one_graph(residual, mixer):
    torch._dynamo.reset()
    model = case(residual, mixer).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager = model(tokens(), labels=tokens(), use_cache=False)
    eager.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    graph = compiled(tokens(), labels=tokens(), use_cache=False)
    graph.loss.backward()
    torch.testing.assert_close(graph.logits, eager.logits, atol=1e-5, rtol=1e-4)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[name], atol=1e-5, rtol=1e-3, msg=name)


def decode(model, x, sizes, cache, mask=None):
    """Logits of x fed to the model in pieces of the given sizes."""
    logits, start = [], 0
    for size in sizes:
        piece = None if mask is None else mask[:, : start + size]
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, start : start + size]
        out = model(
            x[:, start : start + size], attention_mask=piece, position_ids=positions, cache=cache, use_cache=True
        )
        logits.append(out.logits)
        start += size
    assert start == x.shape[1]
    return torch.cat(logits, dim=1)


@every_pair
@torch.no_grad()
def test_cached_decoding_is_exact(residual, mixer):
    """Every way to cut a sequence, through every kind of cache, gives the uncached logits."""
    model = case(residual, mixer).double()
    x = tokens(2, 14)
    full = model(x, use_cache=False).logits
    cuts = [[1] * 14, [3, 1, 1, 4, 5], [2, 12], [13, 1]]
    for cut in cuts:
        for cache in (DynamicCache(config=model.config), DynamicCache(), StaticCache(model.config, max_cache_len=16)):
            torch.testing.assert_close(decode(model, x, cut, cache), full, atol=1e-10, rtol=1e-10)


@every_pair
@torch.no_grad()
def test_left_padding_changes_nothing(residual, mixer):
    """Padded with real tokens, so that whatever leaks shows."""
    model = case(residual, mixer).double()
    x = tokens(1, 10)
    alone = model(x, use_cache=False).logits
    for pads in (1, 3, 6):
        padded = torch.cat([tokens(1, pads, seed=5), x], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :pads] = 0
        batch = torch.cat([padded, tokens(1, 10 + pads, seed=7)])
        masks = torch.cat([mask, torch.ones_like(mask)])
        positions = (masks.cumsum(-1) - 1).clamp(min=0)
        out = model(batch, attention_mask=masks, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(out[:1, pads:], alone, atol=1e-10, rtol=1e-10)
        assert out.isfinite().all()
        without_positions = model(batch, attention_mask=masks, use_cache=False).logits
        torch.testing.assert_close(without_positions[:1, pads:], alone, atol=1e-6, rtol=1e-6)
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20)):
            pieces = [1] * (10 + pads) if pads == 3 else [2, 1, 7 + pads]
            cached = decode(model, batch, pieces, cache, masks)
            torch.testing.assert_close(cached[:1, pads:], alone, atol=1e-10, rtol=1e-10)


@every_pair
@torch.no_grad()
def test_generation_does_not_depend_on_the_cache(residual, mixer):
    model = case(residual, mixer).double()
    x = tokens(2, 9)
    x[1, :4] = 0
    inputs = {"input_ids": x, "attention_mask": (x != 0).long(), "max_new_tokens": 7, "eos_token_id": None}
    modes = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 20},
        "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    }
    for name, mode in modes.items():
        torch.manual_seed(0)
        uncached = model.generate(**inputs, **mode, use_cache=False)
        assert uncached.shape[1] == 16
        for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
            torch.manual_seed(0)
            assert torch.equal(model.generate(**inputs, **mode, **options), uncached), (name, options)
    alone = model.generate(x[1:, 4:], max_new_tokens=7, do_sample=False, eos_token_id=None)
    assert torch.equal(alone[0, 5:], model.generate(**inputs, do_sample=False)[1, 9:])


@every_pair
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(residual, mixer):
    model = case(residual, mixer).double()
    lengths = [5, 1, 9, 2]
    documents = [tokens(1, length, seed=length) for length in lengths]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    seq_idx = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    alone = torch.cat([model(document, use_cache=False).logits for document in documents], dim=1)
    for extra in ({}, {"seq_idx": seq_idx}, {"seq_idx": seq_idx, "attention_mask": torch.ones_like(packed)}):
        together = model(packed, position_ids=positions, use_cache=False, **extra).logits
        torch.testing.assert_close(together, alone, atol=1e-10, rtol=1e-10)


@every_case
def test_save_and_reload_is_exact(residual, mixer, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        model = case(residual, mixer).to(dtype)
        folder = tmp_path / str(dtype)
        model.save_pretrained(folder)
        again, info = Transformer2ForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name].to(dtype), tensor), name
        varies = {"_name_or_path", "dtype", "auto_map", "transformers_version"}
        ours, theirs = ({k: v for k, v in m.config.to_dict().items() if k not in varies} for m in (model, again))
        assert ours == theirs
        if dtype == torch.float32:
            assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@every_case
def test_hidden_states_and_attentions(residual, mixer):
    model = case(residual, mixer)
    model.set_attn_implementation("eager")
    out = model(tokens(), output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(2, 12, SIZE["hidden_size"])] * 4
    assert [tuple(a.shape) for a in out.attentions] == [(2, 4, 12, 12)] * 3


@every_case
@torch.no_grad()
def test_attention_backends_agree(residual, mixer):
    model = case(residual, mixer).double()
    x, mask = tokens(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    logits = []
    for backend in ("eager", "sdpa"):
        model.set_attn_implementation(backend)
        logits.append(model(x, attention_mask=mask).logits)
    torch.testing.assert_close(logits[0][mask.bool()], logits[1][mask.bool()], atol=1e-10, rtol=1e-10)


@every_case
@torch.no_grad()
def test_bfloat16_stays_close(residual, mixer):
    model = case(residual, mixer, noise=0.05)
    exact = model(tokens()).logits
    half = copy.deepcopy(model).bfloat16()(tokens()).logits
    assert half.dtype == torch.bfloat16
    assert (half.float() - exact).norm() < 0.1 * exact.norm()


@every_case
def test_causal(residual, mixer):
    """A later token changes no earlier logit."""
    model = case(residual, mixer).double()
    x = tokens(1, 12)
    other = x.clone()
    other[:, 7] = (x[:, 7] + 1) % 100
    difference = (model(x).logits - model(other).logits).abs().amax(-1)[0]
    assert difference[:7].max() < 1e-12
    assert difference[7:].min() > 1e-9


@every_case
def test_zero_states_have_finite_gradients(residual, mixer):
    """Padding has a zero embedding: no norm, gate or softmax may divide by it, forwards or backwards."""
    model = case(residual, mixer).train()
    x = tokens()
    x[0, :5] = 0
    model(x, attention_mask=(x != 0).long(), labels=x, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@every_case
def test_residuals_own_no_parameter_directly(residual, mixer):
    """Their methods are not `forward`, so hooks that bring offloaded parameters back would not see them."""
    for module in case(residual, mixer).modules():
        if isinstance(module, Residual):
            assert not list(module.parameters(recurse=False))


@every_case
def test_names_survive_old_checkpoints_rules(residual, mixer):
    """Some versions of transformers rename parameters called beta or gamma when they load them."""
    for name, _ in case(residual, mixer).named_parameters():
        assert not {"beta", "gamma"} & set(name.split("."))


@every_case
@torch.no_grad()
def test_runs_from_disk(residual, mixer, tmp_path):
    from accelerate import disk_offload

    model = case(residual, mixer)
    expected = model(tokens()).logits
    disk_offload(model, str(tmp_path), execution_device="cpu")
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if is_new(name))
    torch.testing.assert_close(model(tokens()).logits, expected)


@every_case
@torch.no_grad()
def test_a_copy_is_independent(residual, mixer):
    """A deep copy (PEFT and EMA make them) uses its own parameters throughout."""
    model = case(residual, mixer)
    expected = model(tokens()).logits
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.fill_(math.nan)
    torch.testing.assert_close(twin(tokens()).logits, expected, atol=0, rtol=0)


@every_case
@torch.no_grad()
def test_cache_slots_are_counted_right(residual, mixer):
    """The configuration promises exactly the states that a forward pass fills."""
    model = case(residual, mixer)
    cache = model(tokens(), use_cache=True)[CACHE_FIELD]
    filled = [sum(getattr(layer, "is_conv_states_initialized", {}).values()) for layer in cache.layers]
    types = ["hybrid" if count else "full_attention" for count in filled]
    assert model.config.layer_types == types
    assert model.config.number_of_conv_states == max(filled)


@pytest.mark.parametrize("mixer", ["swa", "swa_chunk"])
@torch.no_grad()
def test_cache_operations(mixer):
    """Repeating, selecting, reordering, resetting and continuing a cache keeps every state in step."""
    model = case("ddl_tc_ec", mixer).double()
    x = tokens(2, 12)
    full = model(x, use_cache=False).logits
    for make in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, max_cache_len=16)):
        cache = make()
        decode(model, x[:, :7], [7], cache)
        cache.batch_repeat_interleave(3)
        out = model(x.repeat_interleave(3, dim=0)[:, 7:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(out, full.repeat_interleave(3, dim=0)[:, 7:], atol=1e-10, rtol=1e-10)

        cache = make()
        decode(model, x[:, :7], [7], cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        out = model(x.flip(0)[:, 7:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(out, full.flip(0)[:, 7:], atol=1e-10, rtol=1e-10)

        cache = make()
        decode(model, x[:, :7], [7], cache)
        cache.batch_select_indices(torch.tensor([1]))
        out = model(x[1:, 7:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(out, full[1:, 7:], atol=1e-10, rtol=1e-10)

    static = StaticCache(model.config, max_cache_len=16)  # a dynamic one is made anew instead
    decode(model, x, [8, 4], static)
    static.reset()
    torch.testing.assert_close(decode(model, x, [5, 7], static), full, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("auto_class", [Transformer2Model, Transformer2ForCausalLM])
def test_gates_stay_in_float32(auto_class, tmp_path):
    """Loading in half precision keeps DDL's parameters in float32, and the rest in what was asked for."""
    case("ddl_identity_tc_ec", "swa").save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, torch.float16):
        model = auto_class.from_pretrained(tmp_path, dtype=dtype)
        for name, parameter in model.named_parameters():
            kept = any(part.endswith("residual") for part in name.split("."))
            assert parameter.dtype == (torch.float32 if kept else dtype), name


@pytest.mark.parametrize(("residual", "mixer"), [("standard", "swa"), ("ddl_tc_ec", "swa_chunk"), ("ddl_tc", "none")])
@torch.no_grad()
def test_rolling_back(residual, mixer):
    """A cache that records its past can be cropped, as assisted decoding does, and goes on exactly."""
    model = case(residual, mixer).double()
    x = tokens(2, 12)
    full = model(x, use_cache=False).logits
    for make in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, max_cache_len=24)):
        cache = make()
        repair(cache, model.config)
        cache.activate_past_recording()
        decode(model, x[:, :6], [5, 1], cache)
        wrong = (x[:, 6:9] + 1) % 101
        model(wrong, cache=cache, use_cache=True)
        if isinstance(cache, StaticCache) and not hasattr(StaticLayer, "crop"):  # transformers 5.15
            with pytest.raises(RuntimeError, match="install 5.24 or newer"):
                cache.layers[0].crop(-3)
            continue
        cache.crop(-3)
        for position in range(6, 12):
            logits = model(x[:, position : position + 1], cache=cache, use_cache=True).logits
            torch.testing.assert_close(logits[:, 0], full[:, position], atol=1e-10, rtol=1e-10)
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(x[:1], use_cache=False, **greedy)
    assert torch.equal(model.generate(x[:1], prompt_lookup_num_tokens=2, **greedy), expected)
    assert torch.equal(model.generate(x[:1], assistant_model=case("standard", "none").double(), **greedy), expected)
