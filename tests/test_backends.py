"""Attention backends, compiled decoding and continuous batching, as far as a CPU shows them."""

import pytest
import torch
from helpers import CASES, LOCAL_MIXERS, RESIDUALS, case, tiny_model, tokens
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from transformer2.compat import CACHE_FIELD

every_mixer = pytest.mark.parametrize("mixer", LOCAL_MIXERS)
WITHOUT_STATES = [name for name in RESIDUALS if not any(part in name for part in ("_tc", "_ec"))]
CALLS: list[dict] = []


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """What a flash attention kernel computes from the arguments of the library's interface, densely."""
    CALLS.append({"module": type(module).__name__, "mask": attention_mask, "window": sliding_window, **kwargs})
    length, keys = query.shape[2], key.shape[2]
    distance = torch.arange(keys)[keys - length :, None] - torch.arange(keys)
    visible = (distance >= 0) & (distance < (sliding_window or keys))
    visible = visible.expand(len(query), 1, -1, -1)
    if attention_mask is not None:
        assert attention_mask.shape == (len(query), keys), "flash attention takes 2-D masks"
        visible = visible & attention_mask.bool()[:, None, None, :]
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None and attention_mask is None and kwargs.get("position_ids") is not None and length == keys:
        starts = torch.cat([(kwargs["position_ids"][0] == 0).nonzero().flatten(), torch.tensor([keys])])
    if starts is not None:
        document = torch.bucketize(torch.arange(keys), starts, right=True)
        visible = visible & (document[:, None] == document)
    visible = visible | (distance == 0)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash():
    """The name of a backend that is treated as flash attention."""
    AttentionInterface.register("flash_stand_in", flash_stand_in)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    CALLS.clear()
    return "flash_stand_in"


@every_mixer
@torch.no_grad()
def test_flash_attention_gets_the_right_arguments(mixer, flash):
    """2-D masks, windows and packed rows through the standard interface give what sdpa gives."""
    model = tiny_model("standard", LOCAL_MIXERS[mixer], sliding_window=6, layer_types=None).double()
    x = tokens(2, 12)
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    positions = torch.tensor([[*range(5), *range(7)]])
    inputs = [
        {"input_ids": x},
        {"input_ids": x, "attention_mask": mask},
        {"input_ids": x[:1], "position_ids": positions},
    ]
    for arguments in inputs:
        model.set_attn_implementation("sdpa")
        expected = model(**arguments, use_cache=False).logits
        model.config._attn_implementation = flash  # the setter would look for a kernel
        CALLS.clear()
        logits = model(**arguments, use_cache=False).logits
        keep = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"])).bool()
        torch.testing.assert_close(logits[keep], expected[keep], atol=1e-10, rtol=1e-10)
        by_module = {call["module"]: call["window"] for call in CALLS}
        assert by_module["Transformer2Attention"] == 6
        options = model.config.local_mixer
        handed_over = (
            options["type"] == "short_swa" and options["mask"] == "sliding" and "position_ids" not in arguments
        )
        assert by_module.get("LocalShortSWA") == (options["window"] if handed_over else None)
    cached = model.generate(x, max_new_tokens=6, do_sample=False, eos_token_id=None)
    model.set_attn_implementation("sdpa")
    assert torch.equal(
        cached, model.generate(x, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False)
    )


@torch.no_grad()
def test_flash_attention_refuses_packed_batches_that_it_cannot_tell_apart(flash):
    model = case("standard", "canon")
    model.config._attn_implementation = flash  # the setter would look for a kernel
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(tokens(2, 8), seq_idx=torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]]), use_cache=False)


@pytest.mark.parametrize(
    "mixer", ["swa", *(pytest.param(m, marks=pytest.mark.slow) for m in ("none", "canon", "conv"))]
)
@torch.no_grad()
def test_flex_attention(mixer):
    """Without a cache, padded and packed (on a CPU, flex attention goes no further)."""
    model = case("standard", mixer, hidden_size=64, head_dim=16)
    x = tokens(2, 12)
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    positions = torch.tensor([[*range(5), *range(7)]])
    inputs = [{"input_ids": x, "attention_mask": mask}, {"input_ids": x[:1], "position_ids": positions}]
    for arguments in inputs:
        model.set_attn_implementation("sdpa")
        expected = model(**arguments, use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        logits = model(**arguments, use_cache=False).logits
        keep = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"])).bool()
        torch.testing.assert_close(logits[keep], expected[keep], atol=1e-5, rtol=1e-5)


QUICK = [*(("standard", mixer) for mixer in LOCAL_MIXERS), ("ddl_tc_ec", "swa_chunk"), ("depth_swa", "none")]


@pytest.mark.parametrize(
    ("residual", "mixer"),
    [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in CASES if pair not in QUICK)],
)
@torch.no_grad()
def test_static_decoding_compiles_once(residual, mixer):
    """Every decoding step runs the same graph."""
    torch._dynamo.reset()
    model = case(residual, mixer)
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    cache = StaticCache(model.config, max_cache_len=16)
    x = tokens(2, 12)
    full = model(x, use_cache=False).logits
    model(x[:, :6], cache=cache, use_cache=True)
    step = torch.compile(model, fullgraph=True, dynamic=False, backend=count)
    for position in range(6, 12):
        piece = x[:, position : position + 1]
        masks = model.create_masks_for_generate(
            model.config, model.get_input_embeddings()(piece), None, cache, torch.tensor([[position]])
        )
        logits = step(
            piece, attention_mask=masks, position_ids=torch.tensor([[position]]), cache=cache, use_cache=True
        ).logits
        torch.testing.assert_close(logits[:, 0], full[:, position], atol=1e-5, rtol=1e-4)
    assert len(graphs) == 1


@pytest.mark.parametrize("residual", WITHOUT_STATES)
@torch.no_grad()
def test_continuous_batching(residual):
    """Requests of different lengths, prefills that are split, and more requests than fit at once: as `generate`."""
    model = case(residual, "none")
    if CACHE_FIELD != "cache":  # older than 5.24
        with pytest.raises(RuntimeError, match="5.24 or newer"):
            model.generate_batch(inputs=[[1, 2, 3]])
        return
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (3, 9, 5, 14)]
    config = model.generation_config
    config.update(max_new_tokens=6, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=8),
    )
    found = [output.generated_tokens for output in outputs.values()]
    model.set_attn_implementation("sdpa")
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        for prompt in prompts
    ]
    assert sorted(found) == sorted(row.tolist() for row in expected)


@pytest.mark.parametrize(("residual", "mixer"), [("standard", "swa"), ("standard", "conv"), ("ddl_tc", "none")])
def test_continuous_batching_refuses_other_states(residual, mixer):
    with pytest.raises((ValueError, RuntimeError), match="use generate"):
        case(residual, mixer).generate_batch(inputs=[[1, 2, 3]])
