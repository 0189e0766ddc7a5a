"""Schedules of parameters, early ends, best models and utilisation: what a run reports of them."""

import pytest
import torch
from helpers import SIZE
from safetensors.torch import load_file
from training_tools import IDENTITY_DDL, IDENTITY_SHORT_SWA, checkpoint, documents, run_settings

from transformer2.errors import UserError
from transformer2.training import evaluate, train
from transformer2.training.loading import load_model
from transformer2.training.packing import PackedText
from transformer2.training.parameters import is_new
from transformer2.training.throughput import flops_per_token, peak_flops, utilisation


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31, 16, 16]))
    (tmp_path / "held.txt").write_text(documents([16, 16]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt")
    settings["data"]["eval"] = str(tmp_path / "held.txt")
    return settings


def test_annealing_ends_in_the_published_rule_and_says_what_it_cost(settings, tmp_path):
    settings["optimisation"]["anneal"] = {"erase": 1, "carry": 0}
    report = train(settings)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("erase", "carry")):
            assert value.item() == (1.0 if name.endswith("erase") else 0.0), name
    (stage,) = report["stages"]
    assert stage["anneal"]["parameters"] == 4 * SIZE["num_hidden_layers"]  # two in each of two sublayers
    cost = report["evaluations"][-1]["nll"] - report["evaluations"][0]["nll"]
    assert stage["anneal"]["cost_in_nats"] == pytest.approx(cost)
    assert f"{abs(cost):.4f} nats per token" in stage["anneal"]["sentence"]
    scored = evaluate(tmp_path / "out", tmp_path / "held.txt", separator="|", sequence_length=16)
    assert scored["nll"] == pytest.approx(report["evaluations"][-1]["nll"], rel=1e-5)  # the files are what was scored


def test_a_schedule_for_what_the_model_lacks_is_refused(settings):
    settings["optimisation"]["anneal"] = {"erasee": 1}
    with pytest.raises(UserError, match="no parameter 'erasee' that is a single number"):
        train(settings)


def test_a_stage_ends_early_and_the_result_is_the_best_model(settings, tmp_path):
    settings["optimisation"] |= {"steps": 12, "lr": {"new": 0.09}, "clip": None, "schedule": "constant", "warmup": 0.0}
    settings["evaluation"] = {"every": 1, "patience": 2, "keep_best": True}
    report = train(settings)
    losses = [evaluation["nll"] for evaluation in report["evaluations"]]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert len(report["steps"]) < 12
    assert report["stages"][0]["ended_early"] is True
    assert len(losses) - 1 - best == 2  # two evaluations in a row without a gain
    assert report["best"] == {"step": best, "nll": losses[best]}
    scored = evaluate(tmp_path / "out", tmp_path / "held.txt", separator="|", sequence_length=16)
    assert scored["nll"] == pytest.approx(losses[best], rel=1e-5)
    assert abs(losses[-1] - losses[best]) > 1e-3  # or the last model would have passed, too
    assert not (tmp_path / "out-run").exists()


def test_mfu_counts_the_products_of_the_model_and_of_its_new_operators(settings, tmp_path):
    rows = PackedText(torch.randint(3, 100, (32,)).numpy(), [32], None).rows(32)
    plain = load_model(checkpoint(tmp_path / "plain", "standard", dtype=torch.float32))
    mixed = load_model(checkpoint(tmp_path / "mixed", "standard", IDENTITY_SHORT_SWA, dtype=torch.float32))
    device = torch.device("cpu")
    config, layers = plain.config, plain.config.num_hidden_layers
    width, head = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    matrices = width * head * (2 * heads + 2 * kv) + 3 * width * config.intermediate_size
    attention = 2 * 2 * 32 * head * heads  # scores and values, of 32 keys: a square is computed
    forward = 2 * (layers * matrices + width * config.vocab_size) + layers * attention
    assert flops_per_token(plain, rows, device) == pytest.approx(3 * forward, rel=1e-6)
    projections = sum(p.numel() for n, p in mixed.named_parameters() if is_new(n) and p.dim() == 2)
    more = flops_per_token(mixed, rows, device) - flops_per_token(plain, rows, device)
    assert 3 * 2 * projections < more < 3 * 2 * projections * 2  # and their attention over a window
    for parameter in plain.parameters():
        parameter.requires_grad_(False)
    assert flops_per_token(plain, rows, device) == pytest.approx(2 * forward, rel=1e-6)
    assert utilisation(5e11, 1e12, 1) == 0.5
    assert utilisation(5e11, 1e12, 2) == 0.25
    assert utilisation(5e11, None, 2) is None
    assert peak_flops(None, 989.0) == 989e12


def test_the_report_has_the_mfu_of_a_machine_whose_peak_is_named(settings):
    settings["tracking"] = {"peak_tflops": 0.001}
    report = train(settings)
    per_second = report["flops_per_token"] * report["tokens_per_second"]
    assert report["mfu"] == pytest.approx(per_second / 1e9)
