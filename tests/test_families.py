"""Llama's relatives, and this family's own checkpoints, as sources of a conversion: exact, or refused."""

import json

import pytest
import torch
from helpers import SIZE, tiny_model
from test_relatives import RELATIVES, relative
from transformers import AutoModelForCausalLM

from transformer2.conversion import convert, verify
from transformer2.conversion.costs import costs_of
from transformer2.errors import UserError

VARIANTS = {
    "ddl": {"residual": {"type": "ddl", "value_channels": 2}},
    "attn_res": {"residual": "attn_res"},
    "mudd": {"residual": "mudd"},
    "short_swa": {"local_mixer": {"type": "short_swa", "window": 4}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_convert_exactly(name, variant, tmp_path):
    theirs, _ = relative(name, torch.bfloat16)
    theirs.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", **VARIANTS[variant], verify="L1")
    result = verify(tmp_path / "source", tmp_path / "out", "L3", fresh_process=False)
    assert result["passed"], result["failures"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"use_sliding_window", "max_window_layers", "no_rope_layers"} & set(config)


def test_a_relative_generates_as_before(tmp_path):
    """Through the Auto class, from the folder: an independent path to the same tokens."""
    theirs, _ = relative("qwen2_sliding", torch.float32)
    theirs.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", residual="mudd", verify="L0")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[5, 7, 11, 13, 17, 19, 23, 29]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(prompt, **options), theirs.generate(prompt, **options))


@pytest.fixture
def trained(tmp_path):
    """A Transformer2 with a residual whose weights are not at their start, and no local mixer."""
    model = tiny_model({"type": "ddl", "form": "paper", "value_channels": 2}, dtype="float32")
    model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


@pytest.mark.parametrize("local_mixer", ["short_swa", "short_conv", "canon"])
def test_own_checkpoints_get_a_mixer(trained, local_mixer, tmp_path):
    """The published residual stays as it was trained; only the mixer is new."""
    report = convert(trained, tmp_path / "out", local_mixer=local_mixer, verify="L3")
    assert report["residual"]["form"] == "paper"
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (trained, tmp_path / "out"))
    ids = torch.arange(1, 20)[None]
    assert torch.equal(before(ids).logits, after(ids).logits)
    new = set(after.state_dict()) - set(before.state_dict())
    assert new
    assert report["new_tensors"] == len(new)
    assert all("local" in name for name in new)


def test_own_checkpoints_get_a_residual(tmp_path):
    tiny_model("standard", "short_swa").save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", residual="attn_res", verify="L3")
    assert report["verification"]["passed"]
    assert report["local_mixer"]["type"] == "short_swa"


@pytest.mark.parametrize("residual", ["mudd", "standard", "ddl"])
def test_weights_are_not_lost_to_another_variant(trained, residual, tmp_path):
    with pytest.raises(UserError, match="has residual 'ddl' already, .* leave the residual out"):
        convert(trained, tmp_path / "out", residual=residual, verify="L0")
    assert not (tmp_path / "out").exists()


def test_costs_of_a_relative(tmp_path):
    theirs, _ = relative("qwen3", torch.float32)
    theirs.save_pretrained(tmp_path / "source")
    plain = costs_of(tmp_path / "source")["residual", "standard"]
    assert plain["parameters"] == sum(p.numel() for p in theirs.model.parameters())
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "bert", **SIZE}))
    with pytest.raises(UserError, match="says 'bert'"):
        costs_of(tmp_path / "source")
