"""A run that made the model worse says so, names the likely cause, and keeps it in its report."""

import json
from types import SimpleNamespace

import pytest
import torch
from training_tools import IDENTITY_DDL, IDENTITY_SHORT_SWA, checkpoint, command, documents, run_settings

from transformer2.training.diagnosis import suggested, warnings
from transformer2.training.settings import LearningRates, OptimisationSettings

DDL_CONFIG = SimpleNamespace(residual={"type": "ddl"}, local_mixer={"type": "none"})


def found(evaluations=(), losses=(3.0, 3.0), **optimisation):
    perplexities = [{"perplexity": value} for value in evaluations]
    steps = [{"loss": loss} for loss in losses]
    return warnings([OptimisationSettings(**optimisation)], DDL_CONFIG, perplexities, steps)


@pytest.mark.parametrize(
    ("evaluations", "losses", "rate", "words"),
    [
        ([10.0, 14.9], [3.0, 9.0], 1e-3, []),  # the held-out text knows better than single steps
        ([10.0, 15.1], [3.0, 3.0], 1e-3, ["perplexity rose from 10.000 to 15.100"]),
        ([10.0, 5.0, float("inf")], [3.0, 3.0], 1e-3, ["rose from 10.000 to inf"]),
        ([], [3.0, 3.9], 1e-3, []),
        ([], [3.0, 4.1], 1e-3, ["The loss rose from 3.000 to 4.100"]),
        ([10.0, 9.0], [3.0, 3.0], 0.2, ["optimisation.lr.new = 0.2 moves every parameter by about 0.2"]),
        ([10.0, 99.0], [3.0, 3.0], 1e9, ["optimisation.lr.new = 1e+09", "perplexity rose"]),
    ],
)
def test_what_is_found(evaluations, losses, rate, words):
    sentences = found(evaluations, losses, lr=LearningRates(new=rate))
    assert len(sentences) == len(words)
    for sentence, part in zip(sentences, words, strict=True):
        assert part in sentence
        assert "1e-3 to 3e-3 for DDL" in sentence
        assert "ShortSWA" not in sentence


def test_the_rate_of_frozen_parameters_does_not_matter():
    rates = LearningRates(new=1e-3, pretrained=1e9)
    assert found(lr=rates, train="new") == []
    (sentence,) = found(lr=rates, train="all")
    assert "optimisation.lr.pretrained" in sentence
    assert "2e-5" in sentence


def test_rates_are_those_of_the_model():
    both = SimpleNamespace(residual={"type": "short_swa"}, local_mixer={"type": "none"})
    assert suggested(both, False) == "3e-4 to 5e-4 for ShortSWA"
    assert suggested(SimpleNamespace(), True) == "about 2e-5 for pretrained parameters"  # a plain Llama


@pytest.mark.parametrize("held_out", [True, False])
def test_the_command_says_it_at_the_end(tmp_path, monkeypatch, capsys, held_out):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt", train="all")
    settings["optimisation"]["lr"] = {"new": 1e-3, "pretrained": 5.0}
    if held_out:
        settings["data"]["eval_tokens"] = 12
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    code, _, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml")
    assert code == 0
    said = [line for line in error.splitlines() if line.startswith("Warning: ")]
    assert error.splitlines()[-len(said) :] == said
    assert len(said) == 2
    assert ("Held-out perplexity rose" if held_out else "The loss rose") in said[1]
    assert "1e-3 to 3e-3 for DDL, 3e-4 to 5e-4 for ShortSWA, about 2e-5 for pretrained" in said[1]
    report = json.loads((tmp_path / "out" / "training_report.json").read_text())
    assert [f"Warning: {warning}" for warning in report["warnings"]] == said


def test_a_good_run_has_no_warnings(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt", lr={"new": 1e-3})
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    code, out, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml", "--json")
    assert (code, json.loads(out)["warnings"]) == (0, [])
    assert "Warning: " not in error
