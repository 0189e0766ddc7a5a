"""Presets: every variant at every size, by name."""

import pytest
import torch
from helpers import tokens

from transformer2 import LOCAL_MIXERS, RESIDUALS, Transformer2ForCausalLM
from transformer2.configs import names, preset, variant

SIZES = {"tiny": 64, "135m": 576, "360m": 960, "1b": 2048, "8b": 4096}
# Parameters of the models whose shapes these are, as their publishers count them (tied embeddings once).
PUBLISHED = {"135m": 134_515_008, "360m": 361_821_120, "1b": 1_235_814_400, "8b": 8_030_261_248}


def test_there_is_one_for_everything():
    assert set(names("sizes")) == set(SIZES)
    for axis, menu in (("residual", RESIDUALS), ("local_mixer", LOCAL_MIXERS)):
        assert {variant(axis, name)["type"] for name in names(axis)} == set(menu)
        assert all(about.endswith(".") for about in names(axis).values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("residual", names("residual"))
def test_every_preset_is_valid(residual, size):
    config = preset(f"{residual}+short_swa-{size}")
    assert config.hidden_size == SIZES[size]
    assert config.residual["type"] == variant("residual", residual)["type"]
    assert config.local_mixer["type"] == "short_swa"
    assert preset(f"{residual}-{size}").local_mixer == {"type": "none"}


@pytest.mark.parametrize("residual", names("residual"))
def test_tiny_presets_run(residual):
    model = Transformer2ForCausalLM(preset(f"{residual}+short_swa-tiny", vocab_size=101))
    assert model(tokens(), labels=tokens()).loss.isfinite()


@pytest.mark.parametrize("size", PUBLISHED)
def test_shapes_are_those_of_the_published_models(size):
    with torch.device("meta"):
        model = Transformer2ForCausalLM(preset(f"standard-{size}"))
    assert model.num_parameters() == PUBLISHED[size]


def test_deep_models_get_what_their_paper_advises():
    assert preset("mudd-8b").residual["prepost_norm"]
    assert not preset("mudd-1b").residual["prepost_norm"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mudd", "should read RESIDUAL-SIZE"),
        ("ddl+-tiny", "no local_mixer preset ''"),
        ("mudd-7b", "no size preset '7b'; choose one of: 135m"),
        ("muddy-135m", "no residual preset 'muddy'; choose one of: "),
        ("../residual/mudd-135m", "no residual preset"),
        ("mudd+canoe-135m", "no local_mixer preset 'canoe'"),
    ],
)
def test_unknown_names_get_the_menu(name, sentence):
    with pytest.raises(ValueError, match=".") as error:
        preset(name)
    assert sentence in str(error.value)
