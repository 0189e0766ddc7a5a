"""Caches of every kind, with every mixer: sliding attention, quantised and offloaded caches, chunks, roll-back."""

import copy

import pytest
import torch
from helpers import LOCAL_MIXERS, RESIDUALS, case, tiny_llama, tiny_model, tokens
from test_contract import decode
from transformers import DynamicCache, QuantizedCache, StaticCache, cache_utils
from transformers.cache_utils import StaticLayer

from transformer2 import Transformer2Config
from transformer2.caches import repair, without_states
from transformer2.compat import CACHE_FIELD
from transformer2.variants import local_places

every_mixer = pytest.mark.parametrize("mixer", LOCAL_MIXERS)
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
SLIDING = {"all": None, "some": ["full_attention", "sliding_attention", "full_attention"]}
HAS_FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")  # the one quantised cache without another package, from 5.24 on


def sliding(mixer: str, which: str, residual: str = "ddl_tc_ec"):
    return tiny_model(RESIDUALS[residual], LOCAL_MIXERS[mixer], sliding_window=5, layer_types=SLIDING[which])


@every_mixer
@pytest.mark.parametrize("which", SLIDING)
@torch.no_grad()
def test_sliding_global_attention_is_exact_through_every_cache(which, mixer):
    model = sliding(mixer, which).double()
    x = tokens(2, 14)
    full = model(x, use_cache=False).logits
    for cut in ([1] * 14, [3, 1, 1, 4, 5], [2, 12]):
        for cache in (DynamicCache(config=model.config), DynamicCache(), StaticCache(model.config, max_cache_len=16)):
            torch.testing.assert_close(decode(model, x, cut, cache), full, atol=1e-10, rtol=1e-10)
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    alone = model(x[:1, 4:], use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
        cached = decode(model, x, [2, 1, 6, 1, 4], cache, mask)
        torch.testing.assert_close(cached[:1, 4:], alone, atol=1e-10, rtol=1e-10)
    expected = model.generate(x, use_cache=False, **GREEDY)
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 3}):
        uncached = model.generate(x, use_cache=False, **{**GREEDY, **options, "cache_implementation": None})
        assert torch.equal(
            model.generate(x, **{**GREEDY, **options}), uncached if "num_beams" in options else expected
        )


@torch.no_grad()
def test_a_sliding_window_hides_what_is_older():
    """Against attention by hand: a token sees `sliding_window` tokens, itself included."""
    model = sliding("none", "all", "standard").double()
    model.config.num_hidden_layers = 1
    x = tokens(1, 12)
    other = x.clone()
    other[0, 3] = (x[0, 3] + 1) % 100
    changed = (model(x).logits - model(other).logits).abs().amax(-1)[0] > 1e-12
    assert changed.tolist() == [3 <= position < 8 for position in range(12)]


@every_mixer
@torch.no_grad()
def test_chunked_prefill(mixer):
    """Chunks of any size, one token included, with left padding."""
    model = case("ddl_tc_ec", mixer).double()
    x = tokens(2, 9)
    x[1, :4] = 0
    inputs = {"input_ids": x, "attention_mask": (x != 0).long(), **GREEDY}
    expected = model.generate(**inputs, use_cache=False, return_dict_in_generate=True, output_logits=True)
    for size in (1, 3, 4):
        for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
            out = model.generate(
                **inputs, prefill_chunk_size=size, return_dict_in_generate=True, output_logits=True, **options
            )
            assert torch.equal(out.sequences, expected.sequences)
            for ours, theirs in zip(out.logits, expected.logits, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


@every_mixer
@torch.no_grad()
def test_short_prompts(mixer):
    """Prompts shorter than, as long as and longer than kernels and windows."""
    model = case("ddl_tc_ec", mixer).double()
    x = tokens(2, 8)
    full = model(x, use_cache=False).logits
    for length in range(1, 7):
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=8)):
            cached = decode(model, x, [length, *[1] * (8 - length)], cache)
            torch.testing.assert_close(cached, full, atol=1e-10, rtol=1e-10)


@every_mixer
@torch.no_grad()
def test_generation_continues_from_a_returned_cache(mixer):
    model = case("ddl_tc_ec", mixer).double()
    x = tokens(2, 6)
    expected = model.generate(x, use_cache=False, **{**GREEDY, "max_new_tokens": 12})
    first = model.generate(x, return_dict_in_generate=True, **{**GREEDY, "max_new_tokens": 5})
    rest = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),  # not guessed from padding: the random model writes it
        **{CACHE_FIELD: first[CACHE_FIELD]},
        **{**GREEDY, "max_new_tokens": 7},
    )
    assert torch.equal(rest, expected)


@every_mixer
@pytest.mark.parametrize("which", ["full", *SLIDING])
@torch.no_grad()
def test_assisted_decoding(which, mixer):
    """Drafts that are taken back leave no trace: an unrelated assistant, the model itself, and prompt lookup."""
    model = (case("ddl_tc_ec", mixer) if which == "full" else sliding(mixer, which)).double()
    x = tokens(1, 7).repeat(1, 2)  # so that prompt lookup finds something
    expected = model.generate(x, use_cache=False, **GREEDY)
    for assistant in (case("standard", "none", seed=3).double(), copy.deepcopy(model)):
        assert torch.equal(model.generate(x, assistant_model=assistant, **GREEDY), expected)
    assert torch.equal(model.generate(x, prompt_lookup_num_tokens=2, **GREEDY), expected)
    static = {"cache_implementation": "static", "disable_compile": True, "max_cache_len": 40}
    if which == "full" and hasattr(StaticLayer, "crop"):  # sliding layers forget; see test_rolling_back for 5.15
        assert torch.equal(model.generate(x, prompt_lookup_num_tokens=2, **static, **GREEDY), expected)


@every_mixer
@torch.no_grad()
def test_quantised_cache(mixer):
    """Keys and values are quantised, the states of the mixers are not: no more error than without a mixer."""
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    if not HAS_FP8:
        with pytest.raises(ValueError, match="fp8"):
            case("standard", mixer).generate(tokens(1, 4), **options, **GREEDY)
        return
    x, logits, errors = tokens(2, 16), {}, {}
    for name in ("none", mixer):
        model = case("standard", name, noise=0.0 if "identity" in mixer else 0.3)
        model.load_state_dict(case("standard", "none").state_dict(), strict=False)
        cache, exact = QuantizedCache("fp8", config=without_states(model.config)), DynamicCache(config=model.config)
        logits[name], expected = (decode(model, x, [8, *[1] * 8], used) for used in (cache, exact))
        errors[name] = ((logits[name] - expected).norm() / expected.norm()).item()
        if not {"mlp", "gate_up"} & set(local_places(model.config, 0)):  # nothing quantised precedes these states
            for slot, state in getattr(exact.layers[0], "conv_states", {}).items():
                assert state is None or torch.equal(cache.layers[0].conv_states[slot], state)
    if "identity" in mixer:
        assert torch.equal(logits[mixer], logits["none"])
    assert 0 < errors[mixer] < 3 * errors["none"] < 0.1  # random weights pass an error on more or less amplified
    assert case("standard", mixer).generate(tokens(1, 9), num_beams=3, **options, **GREEDY).shape == (1, 17)


@every_mixer
@torch.no_grad()
def test_offloaded_layers_are_not_touched(mixer, monkeypatch):
    """An emulated device: keys and values of a layer are gone from its offloading to its prefetching."""
    model = case("ddl_tc_ec", mixer).double()
    x = tokens(2, 14)
    full = model(x, use_cache=False).logits
    away = {}

    def offload(layer):
        away[id(layer)] = layer.keys, layer.values
        layer.keys, layer.values = (torch.full_like(t, torch.nan) for t in (layer.keys, layer.values))

    def prefetch(layer):
        if id(layer) in away:
            layer.keys, layer.values = away.pop(id(layer))

    def refuse(layer):
        raise AssertionError("states of local operators were moved; operators after attention still need them")

    monkeypatch.setattr(cache_utils.DynamicLayer, "offload", offload)
    monkeypatch.setattr(cache_utils.DynamicLayer, "prefetch", prefetch)
    monkeypatch.setattr(cache_utils.LinearAttentionCacheLayerMixin, "offload", refuse)

    class Offloaded(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            self.layers[layer_idx].prefetch()
            result = super().update(keys, values, layer_idx, *args, **kwargs)
            self.layers[layer_idx].offload()
            return result

    cache = Offloaded(config=model.config)
    torch.testing.assert_close(decode(model, x, [5, 1, 1, 4, 3], cache), full, atol=1e-10, rtol=1e-10)
    assert len(away) == model.config.num_hidden_layers


def test_every_layer_answers_the_whole_interface():
    """Our layer classes have no abstract method left and know their length, in each version of the library."""
    for which, kind in ((None, "Hybrid"), (5, "SlidingHybrid")):
        model = tiny_model("standard", "canon", sliding_window=which)
        x = tokens(2, 6)
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=9)):
            repair(cache, model.config)
            assert not cache.is_initialized
            model(x, cache=cache, use_cache=True)
            for layer in cache.layers:
                assert type(layer).__name__.endswith(f"{kind}Layer")
                assert int(layer.get_seq_length()) == 6
                assert layer.get_max_length() == (
                    min(9, which or 9) if isinstance(cache, StaticCache) else which or -1
                )
            cache.batch_select_indices(torch.tensor([0]))
            assert {state.shape[0] for layer in cache.layers for state in layer.conv_states.values()} == {1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window of at least 1, got None"),
        ({"sliding_window": 0}, "sliding_window of at least 1, got 0"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "got 'chunked_attention'"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, "2 entries for 3 layers"),
        ({"nope_layers": [3]}, "between 0 and 2, got 3"),
    ],
)
def test_attention_fields_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        Transformer2Config(num_hidden_layers=3, hidden_size=32, num_attention_heads=4, **fields)


def test_layer_types_survive_a_round_trip(tmp_path):
    config = sliding("swa", "some").config
    config.save_pretrained(tmp_path)
    again = Transformer2Config.from_pretrained(tmp_path)
    assert again.layer_types == config.layer_types == ["hybrid", "hybrid_sliding", "hybrid"]
    again.residual = "standard"
    again.local_mixer = "none"
    assert again.layer_types == ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("mixer", ["none", "swa", "canon"])
@pytest.mark.parametrize("which", ["full", "all"])
@torch.no_grad()
def test_a_static_cache_that_is_too_small(which, mixer):
    """Filled to the last place it is exact; one token more is refused, also where attention slides further back."""
    model = (
        case("standard", mixer) if which == "full" else tiny_model("standard", LOCAL_MIXERS[mixer], sliding_window=9)
    )
    x = tokens(2, 9)
    cache = StaticCache(model.config, max_cache_len=8)
    model(x[:, :7], cache=cache, use_cache=True)
    logits = model(x[:, 7:8], cache=cache, use_cache=True).logits
    torch.testing.assert_close(logits, model(x[:, :8], use_cache=False).logits[:, 7:], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="static cache holds 8 tokens, and 9 are needed"):
        model(x[:, 8:], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="holds 4 tokens, and 9 are needed"):
        model(x, cache=StaticCache(model.config, max_cache_len=4), use_cache=True)


@torch.no_grad()
def test_a_static_sliding_cache_never_fills_up():
    model = tiny_model("standard", LOCAL_MIXERS["swa"], sliding_window=5)
    x = tokens(1, 14)
    cache = StaticCache(model.config, max_cache_len=8)
    pieces = [model(x[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(14)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(x, use_cache=False).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mixer", ["none", "swa"])
def test_an_empty_prompt(mixer):
    empty = torch.zeros(1, 0, dtype=torch.long)
    for run in (case("standard", mixer), case("standard", mixer).generate):
        with pytest.raises(ValueError, match="no tokens: give at least one"):
            run(empty)


@pytest.mark.parametrize("mixer", ["none", "swa", "conv", "canon"])
def test_packed_rows_stay_apart_in_an_empty_cache_and_are_refused_elsewhere(mixer):
    """Positions that start again say that a row is packed, with a cache object as without one."""
    model = tiny_model("standard", LOCAL_MIXERS[mixer]).double()
    ids = tokens(batch=1, length=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in (ids[:, :4], ids[:, 4:])], 1)
        for cache in (DynamicCache(config=model.config), DynamicCache()):
            packed = model(ids, position_ids=positions, past_key_values=cache).logits
            torch.testing.assert_close(packed, apart, atol=1e-10, rtol=0)
        static = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(ValueError, match="cannot go on from a cache, nor fill a static one"):
            model(ids, position_ids=positions, past_key_values=static)
        filled = model(ids[:, :4], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="cannot go on from a cache"):
            model(ids[:, :4], position_ids=torch.tensor([[4, 5, 0, 1]]), past_key_values=filled)
        again = model(ids[:, 4:], position_ids=torch.arange(4, 9)[None], past_key_values=filled).logits
        torch.testing.assert_close(again, model(ids).logits[:, 4:], atol=1e-10, rtol=0)


def test_documents_need_a_number_for_every_token():
    with pytest.raises(ValueError, match=r"seq_idx has the shape \[1, 3\]: give \[batch, 5\]"):
        tiny_model()(tokens(batch=1, length=5), seq_idx=torch.zeros(1, 3, dtype=torch.int))


def test_a_cache_of_another_model_is_refused():
    model = tiny_model("standard", LOCAL_MIXERS["conv"])
    foreign = tiny_llama()(tokens(length=3), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="This cache was made for another model"):
        model(tokens(length=4), past_key_values=foreign)
