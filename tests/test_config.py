"""The configuration: shorthand, stored options, and one clear sentence for every mistake."""

import json
import logging

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
        ({"residual": "nonsense"}, "Unknown residual type 'nonsense'; choose one of: standard, elc_bert, denseformer"),
        ({"residual": {"value_channels": 2}}, "Unknown residual type None; choose one of"),
        ({"local_mixer": "attention"}, "Unknown local_mixer type 'attention'; choose one of: none, short_conv, canon"),
        (
            {"residual": {"type": "ddl", "channels": 4}},
            "has no option 'channels'; its options are: form, value_channels",
        ),
        ({"residual": {"type": "standard", "form": "paper"}}, "has no option 'form': it takes no options at all"),
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
        ({"residual": {"type": "ddl", "k_eps": 0.0}}, "k_eps from 1e-15 to 1"),
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
        ({"local_mixer": {"type": "short_conv", "kernel_size": 1}}, "between 2 and 1,024, got 1"),
        ({"local_mixer": {"type": "canon", "kernel_size": 0}}, "between 2 and 1,024, got 0"),
        ({"local_mixer": {"type": "canon", "letters": "ABE"}}, "letters are A, B, C and D, each at most once"),
        ({"local_mixer": {"type": "canon", "letters": "AA"}}, "letters are A, B, C and D, each at most once"),
        ({"local_mixer": {"type": "canon", "letters": ""}}, "letters are A, B, C and D, each at most once"),
        ({"local_mixer": {"type": "canon", "form": "identity", "skip": False}}, "needs skip=true"),
        (
            {"local_mixer": {"type": "short_conv", "site": "embedding", "layers": [1]}},
            "stands before all layers, once: leave layers out",
        ),
        ({"local_mixer": {"type": "canon", "window": 4}}, "has no option 'window'; its options are: form, letters"),
        ({"residual": "mudd", "local_mixer": "canon"}, "no local mixer can sit on attention's input"),
        ({"residual": "dca", "local_mixer": {"type": "short_conv", "site": "attn"}}, "choose another place"),
        ({"local_mixer": {"type": "short_swa", "layers": [0, 3]}}, "must be different numbers between 0 and 2"),
        ({"local_mixer": {"type": "short_swa", "layers": "all"}}, "a list of whole numbers or null"),
        ({"local_mixer": {"type": "short_swa", "layers": []}}, "at least one, got []"),
        ({"local_mixer": {"type": "short_swa", "layers": [1, 1]}}, "must be different numbers"),
        ({"residual": {"type": "ddl", "k_eps": float("inf")}}, "must be a finite number, got inf"),
        ({"residual": {"type": "mhc", "alpha_start": float("nan")}}, "must be a finite number, got nan"),
        ({"residual": {"type": "elc_bert", "window": 2}}, "has no option 'window'; its options are: form, start"),
        ({"residual": {"type": "elc_bert", "form": "identity", "start": "last"}}, "identity form needs start=uniform"),
        ({"residual": {"type": "elc_bert", "form": "identity", "normalize": True}}, "needs normalize=False"),
        ({"residual": {"type": "denseformer", "dilation": 0}}, "needs dilation >= 1, got 0"),
        ({"residual": {"type": "denseformer", "period": -1}}, "needs period >= 1, got -1"),
        ({"residual": {"type": "denseformer", "period": 4}}, "the model has only 3 blocks: lower period"),
        ({"residual": {"type": "denseformer", "dilation": 10**400}}, "must be a whole number"),
        ({"residual": {"type": "denseformer", "dilation": 4}}, "the model has only 3 blocks: lower dilation"),
        ({"residual": {"type": ["ddl"]}}, "Unknown residual type ['ddl']; choose one of"),
        ({"residual": {"type": "ddl", "k_eps": 1e-30}}, "k_eps from 1e-15 to 1"),
        ({"residual": {"type": "ddl", "k_eps": 10**400}}, "must be a finite number"),
        ({"residual": {"type": "hyper_connections", "scale_start": 0}}, "scale_start must lie between 1e-6 and 1e3"),
        ({"residual": {"type": "mhc", "alpha_start": 1e300}}, "alpha_start must lie between 1e-6 and 1e3"),
        ({"residual": {"type": "mhc", "form": "identity", "start": "symmetric"}}, "use start=skew"),
        ({"residual": {"type": "short_swa", "num_heads": 2**40}}, "must not exceed 65,536"),
        ({"local_mixer": {"type": "short_swa", "head_dim": 2**40}}, "must not exceed 65,536"),
        ({"residual": {"type": "vertical_attention", "key_dim": 0}}, "key_dim from 1 to"),
        ({"residual": {"type": "dca", "window": 0}}, "window must be 1 or more, got 0"),
        ({"residual": {"type": "dca", "form": "identity", "activation": "relu"}}, "use activation=gelu, or grn=v2"),
        ({"residual": {"type": "mudd", "streams": "qk"}}, "has no option 'streams'"),
        ({"residual": {"type": "attn_res", "block_size": 3}}, "even block_size of at most 6 sublayers"),
        ({"residual": {"type": "attn_res", "block_size": 8}}, "even block_size of at most 6 sublayers"),
        ({"residual": {"type": "attn_res", "block_size": 0}}, "even block_size of at most 6 sublayers"),
        ({"residual": {"type": "attn_res", "block_size": -2}}, "even block_size of at most 6 sublayers"),
        ({"residual": {"type": "delta_attn_res", "num_heads": 5}}, "num_heads must divide hidden_size=32, got 5"),
        ({"residual": {"type": "attn_res", "num_heads": 0}}, "num_heads must divide hidden_size=32, got 0"),
        ({"residual": {"type": "hyper_connections", "num_streams": 0}}, "between 1 and hidden_size=32, got 0"),
        ({"residual": {"type": "mhc", "num_streams": 33}}, "between 1 and hidden_size=32, got 33"),
        ({"residual": {"type": "mhc", "num_streams": 1}}, "needs num_streams >= 2"),
        ({"residual": {"type": "mhc", "sinkhorn_iters": 0}}, "sinkhorn_iters from 1 to 1000, got 0"),
        ({"residual": {"type": "mhc", "sinkhorn_eps": -1.0}}, "0 <= sinkhorn_eps < 0.1"),
        ({"residual": {"type": "mhc", "form": "identity", "sinkhorn_eps": 1e-6}}, "needs sinkhorn_eps=0"),
        ({"residual": {"type": "mhc", "form": "identity", "reduce": "sum"}}, "use reduce=mean"),
        ({"residual": {"type": "hyper_connections", "form": "identity", "reduce": "sum"}}, "use reduce=mean"),
        ({"residual": {"type": "laurel", "rank": 64}}, "rank from 0 (none) to hidden_size=32, got 64"),
        ({"residual": {"type": "laurel", "previous": 7}}, "from 0 (none) to 6 sublayers, got 7"),
        ({"residual": {"type": "laurel", "weighted": False, "rank": 0}}, "is the standard residual: use that"),
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
    if mixer == "canon" and residual in ("dca", "mudd"):
        mixer = {"type": "canon", "letters": "BCD"}  # A has no meaning with them
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
    for kind in RESIDUALS.keys() - {"standard"}:
        assert build(residual=kind).residual["form"] == "paper"


def test_a_checkpoint_of_newer_code_is_warned_of(tmp_path, caplog, monkeypatch):
    Transformer2Config(residual="ddl").save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformer2"), "propagate", True)
    Transformer2Config.from_pretrained(tmp_path)
    assert not caplog.records
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "code_version": stored["code_version"] + 1}))
    config = Transformer2Config.from_pretrained(tmp_path)
    (record,) = [record for record in caplog.records if "version" in record.getMessage()]
    assert "written by version 2 of the model code, and version 1 is installed" in record.getMessage()
    assert "upgrade transformer2" in record.getMessage()
    assert config.code_version == 1  # the code that saves it again
    assert config.residual["type"] == "ddl"
