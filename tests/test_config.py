"""The configuration: shorthand, stored options, and one clear sentence for every mistake."""

import json

import pytest
from helpers import SIZE
from transformers import AutoConfig

from transformer2 import Transformer2Config
from transformer2.variants import LOCAL_MIXERS, RESIDUALS, options_of


def build(**fields):
    return Transformer2Config(**{**SIZE, **fields})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"residual": "nonsense"}, "Unknown residual type 'nonsense'; choose one of: standard, ddl, short_swa"),
        ({"residual": {"value_channels": 2}}, "Unknown residual type None; choose one of"),
        ({"local_mixer": "attention"}, "Unknown local_mixer type 'attention'; choose one of: none, short_swa"),
        (
            {"residual": {"type": "ddl", "channels": 4}},
            "has no option 'channels'; its options are: form, value_channels",
        ),
        ({"residual": {"type": "standard", "form": "paper"}}, "has no option 'form'; its options are: none"),
        (
            {"residual": {"type": "ddl", "form": "exact"}},
            "'form' of 'ddl' must be one of: paper, identity, got 'exact'",
        ),
        ({"residual": {"type": "ddl", "value_channels": "4"}}, "must be a whole number, got '4'"),
        ({"residual": {"type": "ddl", "value_channels": True}}, "must be a whole number, got True"),
        ({"residual": {"type": "ddl", "value_channels": 0}}, "needs at least one value channel"),
        ({"residual": {"type": "ddl", "expand": True}}, "set value_channels=4, or drop the option"),
        ({"residual": {"type": "ddl", "compress": "tokens"}}, "set value_channels=4, or drop the option"),
        ({"residual": {"type": "ddl", "value_channels": 4, "kernel_size": 1}}, "at least 2 taps"),
        ({"residual": {"type": "ddl", "beta_init": 2.0}}, "between 0 and 2"),
        ({"residual": {"type": "ddl", "k_eps": 0.0}}, "k_eps > 0"),
        ({"residual": {"type": "ddl", "gate_hidden_size": 0}}, "positive width"),
        ({"residual": {"type": "ddl", "form": "identity", "value": "sigmoid"}}, "use value=linear"),
        ({"residual": {"type": "ddl", "form": "identity", "beta_init": 0.5}}, "needs beta_init=1"),
        ({"residual": {"type": "short_swa", "window": 0}}, "window must be 1 or more"),
        ({"residual": {"type": "short_swa", "num_heads": 0}}, "positive num_heads"),
        ({"local_mixer": {"type": "short_swa", "window": 0}}, "needs at least 2, got window=0"),
        ({"local_mixer": {"type": "short_swa", "window": 1}}, "needs at least 2, got window=1"),
        ({"local_mixer": {"type": "short_swa", "num_heads": 3, "num_kv_heads": 2}}, "multiple of num_kv_heads"),
        ({"local_mixer": {"type": "short_swa", "head_dim": 7}}, "head_dim must be even"),
        ({"local_mixer": {"type": "short_swa", "site": "nowhere"}}, "must be one of: layer"),
        ({"local_mixer": {"type": "short_swa", "layers": [0, 3]}}, "must lie between 0 and 2"),
        ({"local_mixer": {"type": "short_swa", "layers": "all"}}, "a list of int or null"),
    ],
)
def test_mistakes_get_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=".") as error:
        build(**fields)
    assert sentence in str(error.value)


def test_a_bare_string_is_stored_as_the_dictionary_with_all_options():
    config = build(residual="ddl", local_mixer="short_swa")
    for axis, stored in (("residual", config.residual), ("local_mixer", config.local_mixer)):
        defaults = {name: p.default for name, p in options_of(axis, stored["type"]).items()}
        assert stored == {"type": stored["type"], **defaults}
    assert build().residual == {"type": "standard"}
    assert build().local_mixer == {"type": "none"}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("mixer", LOCAL_MIXERS)
def test_round_trip(residual, mixer, tmp_path):
    config = build(residual=residual, local_mixer=mixer)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.residual == config.residual
    assert again.local_mixer == config.local_mixer
    assert again.layer_types == config.layer_types
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "transformer2"
    changed = AutoConfig.from_pretrained(tmp_path, residual="standard", local_mixer="none")
    assert changed.number_of_conv_states == 0
    assert set(changed.layer_types) == {"full_attention"}


def test_every_option_is_documented():
    for menu in (("residual", RESIDUALS), ("local_mixer", LOCAL_MIXERS)):
        for kind, variant in menu[1].items():
            first = variant.__doc__.splitlines()[0]
            assert first.endswith(".")
            for option in options_of(menu[0], kind):
                assert option == "layers" or f"{option}:" in variant.__doc__ or f"{option}," in variant.__doc__, option


def test_the_form_defaults_to_the_papers():
    for kind in ("ddl", "short_swa"):
        assert build(residual=kind).residual["form"] == "paper"
