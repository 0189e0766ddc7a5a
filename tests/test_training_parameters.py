"""Which parameters are new, trained and decayed; precision and schedule."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from helpers import tiny_llama, tiny_model
from transformers import LlamaForCausalLM

from transformer2.errors import UserError
from transformer2.training import parameters, precision, schedule
from transformer2.training.settings import load_settings, to_yaml

VARIANTS = [
    ({"type": "ddl", "value_channels": 2, "gate_hidden_size": 8, "expand": True}, "none"),
    ("short_swa", "short_swa"),
    ({"type": "short_swa", "share_weights": False}, {"type": "short_swa", "layers": [1]}),
    ("standard", "none"),
]


@pytest.mark.parametrize(("residual", "local_mixer"), VARIANTS)
def test_the_parameters_that_a_llama_does_not_have_are_new(residual, local_mixer):
    model = tiny_model(residual, local_mixer)
    llama = {name for name, _ in LlamaForCausalLM(tiny_llama().config).named_parameters()}
    for name, _ in model.named_parameters():
        assert parameters.is_new(name) == (name not in llama), name


def test_groups_hold_every_trained_parameter_once_and_spare_gates_norms_and_scalars():
    model = tiny_model({"type": "ddl", "form": "identity", "value_channels": 2}, "short_swa")
    parameters.select(model, "all")
    groups = parameters.parameter_groups(model, {"new": 2e-3, "pretrained": 2e-5}, 0.1)
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "new": (2e-3, 0.0),
        "new, decayed": (2e-3, 0.1),
        "pretrained": (2e-5, 0.0),
        "pretrained, decayed": (2e-5, 0.1),
    }
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or any(part in name for part in (".gate.", "norm", "carry", "erase", "compress")):
            assert id(parameter) not in decayed, name
        else:
            assert id(parameter) in decayed, name
    assert sum(group["count"] for group in groups) == sum(p.numel() for p in model.parameters())


def test_only_new_parameters_are_trained_where_asked_and_a_llama_has_none():
    model = tiny_model("standard", "short_swa")
    parameters.select(model, "new")
    assert all(p.requires_grad == parameters.is_new(name) for name, p in model.named_parameters())
    counts = parameters.count_parameters(model)
    assert counts["new"]["frozen"] == counts["pretrained"]["trained"] == 0
    llama = LlamaForCausalLM(tiny_llama().config)
    assert counts["pretrained"]["frozen"] == sum(p.numel() for p in llama.parameters())
    table = parameters.table(model, parameters.parameter_groups(model, {"new": 1e-3, "pretrained": 1e-5}, 0.1))
    assert f"{counts['pretrained']['frozen']:,}" in table
    assert "0.001" in table
    with pytest.raises(UserError, match="no trainable parameter .* convert it first"):
        parameters.select(llama, "new")


def test_loading_types_hold_every_stored_value_exactly():
    half, single, small = torch.bfloat16, torch.float32, torch.float16
    assert precision.load_dtype("bf16", "new", {half, single}) == half
    assert precision.load_dtype("bf16", "all", {half}) == single
    assert precision.load_dtype("fp32", "new", {half}) == single
    assert precision.load_dtype("bf16", "new", {single}) == single
    assert precision.load_dtype("bf16", "new", {small}) == single
    assert precision.choose("bf16") == "bf16"
    assert precision.choose("auto") in ("bf16", "fp32")


def test_the_learning_rate_rises_and_falls():
    factors = [schedule.factor(step, 20, 0.2, 0.1) for step in range(20)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 16)))
    assert factors[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(factors[3:], factors[4:], strict=False))
    assert [schedule.factor(step, 4, 0.5, 0.1, "constant") for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert schedule.factor(0, 1, 0.0, 0.5) == pytest.approx(0.5)


def test_settings_read_back_and_overrides_win():
    base = {"model": "m", "output": "o", "data": {"train": "t.txt"}}
    settings = load_settings(base, ["optimisation.lr.new=1e-3", "optimisation.clip=null", "data.train=[a.txt, b.txt]"])
    assert settings.optimisation.lr.new == 1e-3
    assert settings.optimisation.lr.pretrained == 2e-5
    assert settings.optimisation.clip is None
    assert settings.data.train == ["a.txt", "b.txt"]
    assert load_settings(yaml.safe_load(to_yaml(settings))) == settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimisation.lerning_rate=1", "Unknown setting 'optimisation.lerning_rate'"),
        ("optimisation.warmupp=1", "did you mean 'warmup'"),
        ("dta.train=x", "Unknown setting 'dta': did you mean 'data'"),
        ("data.sequence_length=0", "data.sequence_length must be at least 2, got 0"),
        ("data.sequence_length=1.5", "data.sequence_length must be a whole number, got 1.5"),
        ("optimisation.steps=0", "optimisation.steps must be at least 1"),
        ("optimisation.train=some", "must be one of: new, lora, all, got 'some'"),
        ("optimisation.lr.new=fast", "optimisation.lr.new must be a finite number, got 'fast'"),
        ("optimisation.lr=1e-3", "must be a section of keys and values"),
        ("optimisation.lr.new=0", "must be greater than 0"),
        ("optimisation.lr.new=nan", "must be greater than 0"),
        ("optimisation.lr.new=.inf", "must be greater than 0 and finite"),
        ("optimisation.betas=[0.9]", "must be two numbers"),
        ("overwrite=yes please", "overwrite must be true or false"),
        ("model=", "The setting model"),
        ("steps", "write it as section.key=value"),
        ("data.eval_fraction=2", "data.eval_fraction must lie between 0 and 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(override, message):
    with pytest.raises(UserError) as error:
        load_settings({"model": "m", "output": "o", "data": {"train": "t.txt"}}, [override])
    assert message in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("name", ["new_parameters", "all_parameters"])
def test_the_example_configurations_are_complete(name):
    settings = load_settings(Path(__file__).parent.parent / "configs" / "train" / f"{name}.yaml")
    assert settings.optimisation.train == name.split("_")[0]
    assert settings.optimisation.lr.new == {"new": 2e-3, "all": 3e-4}[settings.optimisation.train]
