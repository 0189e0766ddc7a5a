"""Control runs, nulls and variants: paired scores against independent computations, and what the report says."""

import json

import numpy as np
import pytest
import torch
from helpers import SIZE, tiny_llama
from safetensors.torch import load_file
from training_tools import IDENTITY_DDL, checkpoint, command, documents, run_settings, word_tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from transformer2.errors import UserError
from transformer2.training import train
from transformer2.training.arms import plan_arms
from transformer2.training.data import tokenize
from transformer2.training.paired import DocumentScores, paired_difference, score_documents, verdict
from transformer2.training.parameters import is_new
from transformer2.training.settings import load_settings

LENGTHS = [20, 9, 3, 31, 12, 1, 18, 7, 25, 14]


def scores(targets, nats) -> DocumentScores:
    return DocumentScores(np.array(targets), np.array(nats, dtype=float))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(documents(LENGTHS))
    return file


def test_the_score_of_a_document_is_that_of_a_stock_llama_on_it_alone():
    model = tiny_llama()
    pieces = documents([5, 9, 1, 12]).split("|")
    packed = tokenize(pieces, word_tokenizer(), count_bytes=True)
    found = score_documents(model, packed.rows(64), rows_per_batch=2)
    assert found.targets.tolist() == [4, 8, 0, 11]
    assert found.num_bytes == sum(len(p) - len(p.split()[0]) for p in pieces)
    cut = score_documents(model, packed.rows(4), rows_per_batch=3)  # pieces of at most 4 tokens
    for index, piece in enumerate(pieces):
        ids = torch.tensor([word_tokenizer()(piece)["input_ids"]])
        if ids.shape[1] > 1:
            expected = model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            assert found.nats[index] == pytest.approx(expected, rel=1e-5)
    assert cut.targets.sum() < found.targets.sum()
    assert found.nll == pytest.approx(found.nats.sum() / 23)


def test_the_interval_is_that_of_the_normal_theory_for_many_equal_documents():
    """For documents of one length the bootstrap of a mean is as wide as the textbook interval, 2 * 1.96 s/sqrt n."""
    random = np.random.default_rng(0)
    gains, base = random.normal(-0.5, 2.0, 400), random.normal(30, 20, 400)
    targets = np.full(400, 10)
    paired = paired_difference([scores(targets, base + gains)], [scores(targets, base)])
    low, high = paired["interval"]
    assert paired["difference"] == pytest.approx(gains.sum() / 4000)
    assert (low + high) / 2 == pytest.approx(paired["difference"], abs=2e-3)
    assert high - low == pytest.approx(2 * 1.96 * gains.std() / np.sqrt(400) / 10, rel=0.04)
    assert paired["better_documents"] == pytest.approx((gains < 0).mean())
    assert verdict(paired) == "helped"
    swapped = paired_difference([scores(targets, base)], [scores(targets, base + gains)])
    assert verdict(swapped) == "hurt"
    assert swapped["interval"] == pytest.approx([-high, -low])  # the same resamples


def test_tokens_are_weighted_and_documents_without_targets_do_not_count():
    paired = paired_difference([scores([1, 99, 0], [5.0, 0.0, 0.0])], [scores([1, 99, 0], [0.0, 0.0, 0.0])])
    assert paired["difference"] == pytest.approx(0.05)
    assert (paired["documents"], paired["interval"]) == (2, None)
    assert verdict(paired) == "undecided"
    with pytest.raises(ValueError, match="same documents"):
        paired_difference([scores([1], [1.0])], [scores([2], [1.0])])


def test_seeds_that_disagree_leave_it_undecided():
    targets, base = np.full(50, 10), np.linspace(1, 2, 50)
    better, worse = scores(targets, base - 1), scores(targets, base + 0.1)
    assert verdict(paired_difference([better, better], [scores(targets, base)] * 2)) == "helped"
    mixed = paired_difference([better, worse], [scores(targets, base)] * 2)
    assert mixed["interval"][1] < 0
    assert mixed["per_seed"] == pytest.approx([-0.1, 0.01])
    assert verdict(mixed) == "undecided"


def test_a_control_run_and_its_report(tmp_path, text, monkeypatch, capsys):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text, train="all", lr={"new": 1e-2, "pretrained": 1e-3})
    settings["data"]["eval_tokens"] = 60
    settings |= {"control": True, "nulls": ["write_only", "gate_only"]}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    code, out, error = command(monkeypatch, capsys, "train", tmp_path / "run.yaml")
    assert code == 0, error
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert out.startswith(report["sentence"])
    assert list(report["arms"]) == ["control", "ddl", "ddl, write_only", "ddl, gate_only"]
    assert set(report["comparisons"]) == set(report["arms"]) - {"control"}
    files = {path.name for path in (tmp_path / "out").iterdir()}
    folders = {"control-seed0", "ddl-seed0", "ddl-write_only-seed0", "ddl-gate_only-seed0"}
    assert files == {"report.json", "report.md", "curves.png", "comparison.json"} | folders
    markdown = (tmp_path / "out" / "report.md").read_text()
    assert report["sentence"] in markdown
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")

    # all start as the same function, and the control is a Llama with the trained model's pretrained tensors
    befores = [arm["perplexity_before"][0] for arm in report["arms"].values()]
    assert befores == pytest.approx([befores[0]] * 4, rel=1e-6)
    start, tuned = (load_file(f / "model.safetensors") for f in (model, tmp_path / "out" / "control-seed0"))
    assert set(tuned) == {name for name in start if not is_new(name)}
    own = json.loads((tmp_path / "out" / "control-seed0" / "training_report.json").read_text())
    whole = json.loads((tmp_path / "out" / "ddl-seed0" / "training_report.json").read_text())
    assert own["steps"][0]["loss"] == pytest.approx(whole["steps"][0]["loss"], rel=1e-6)  # the same rows
    assert [step["loss"] for step in own["steps"]] != [step["loss"] for step in whole["steps"]]
    assert report["arms"]["control"]["nll"] == pytest.approx(own["evaluations"][-1]["nll"], rel=1e-5)
    assert report["arms"]["control"]["bits_per_byte"] == pytest.approx(
        own["evaluations"][-1]["bits_per_byte"], rel=1e-5
    )

    # what a null keeps
    for name, kept in {"write_only": ("erase",), "gate_only": ("erase", "rewrite.value")}.items():
        weights = load_file(tmp_path / "out" / f"ddl-{name}-seed0" / "model.safetensors")
        for tensor in (n for n in weights if is_new(n)):
            assert torch.equal(weights[tensor], start[tensor]) == any(part in tensor for part in kept), tensor

    # again: everything is there already, and another comparison does not overwrite it
    before = (tmp_path / "out" / "ddl-seed0" / "training_report.json").stat().st_mtime_ns
    assert train(settings)["sentence"] == report["sentence"]
    assert (tmp_path / "out" / "ddl-seed0" / "training_report.json").stat().st_mtime_ns == before
    settings["optimisation"]["steps"] = 5
    with pytest.raises(UserError, match="holds another comparison"):
        train(settings)


def test_where_only_new_parameters_are_trained_the_control_trains_its_own(tmp_path, text):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text)
    settings["data"]["eval_tokens"] = 60
    report = train({**settings, "control": True})
    assert report["arms"]["control"]["trained"] == report["arms"]["control"]["parameters"]
    assert any("ddl trained" in remark for remark in report["remarks"])
    assert "it trained its pretrained ones" in (tmp_path / "out" / "report.md").read_text()


def test_variants_of_a_llama_start_as_it(tmp_path, text):
    llama = checkpoint(tmp_path / "llama", None, dtype=torch.float32)
    settings = run_settings(llama, tmp_path / "out", text, train="all", steps=2)
    settings["data"]["eval_tokens"] = 60
    report = train({**settings, "control": True, "variants": ["ddl", "short_swa", "standard+short_swa"]})
    assert list(report["arms"]) == ["control", "ddl", "short_swa", "standard+short_swa"]
    befores = [arm["perplexity_before"][0] for arm in report["arms"].values()]
    assert befores == pytest.approx([befores[0]] * 4, rel=1e-6)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "control-seed0").__class__ is LlamaForCausalLM


def test_random_weights_are_shared_by_all_arms_of_a_seed(tmp_path, text):
    tokenizer = checkpoint(tmp_path / "tokenizer", None)
    shape = {name: SIZE[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    settings = run_settings(tokenizer, tmp_path / "out", text, train="all", steps=1)
    settings["model"] = {"preset": "tiny", "tokenizer": str(tokenizer), **shape}
    settings["data"]["eval_tokens"] = 60
    settings["optimisation"]["lr"] = {"new": 1e-9, "pretrained": 1e-9}  # so that the start can be seen
    report = train({**settings, "control": True, "variants": ["ddl", "mudd"], "seeds": [3, 4]})
    assert len(report["arms"]["ddl"]["nll_per_seed"]) == 2
    assert "Nats per token by seed" in (tmp_path / "out" / "report.md").read_text()
    weights = {
        (name, seed): load_file(tmp_path / "out" / f"{name}-seed{seed}" / "model.safetensors")
        for name in report["arms"]
        for seed in (3, 4)
    }
    assert weights["ddl", 3]["model.norm.weight"].shape == (SIZE["hidden_size"],)
    for (name, seed), tensors in weights.items():
        plain = weights["control", seed]
        for tensor in plain:
            torch.testing.assert_close(tensors[tensor], plain[tensor], rtol=0, atol=1e-7, msg=f"{name} {tensor}")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights["ddl", 3][name], weights["ddl", 4][name])
    # both seeds were scored on the same documents
    assert len(report["documents"]["nats"]["ddl"]) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama", "control": True}, "is a plain model, so a control run would repeat it"),
        ({"model": "llama", "nulls": ["write_only"]}, "nulls are for models with a residual of type ddl"),
        ({"nulls": ["read_only"]}, "There is no null 'read_only'; choose from: write_only, gate_only"),
        ({"variants": ["mudd"]}, "variants are tried on a plain model"),
        ({"model": "llama", "variants": ["mud"]}, "no residual preset 'mud'"),
        ({"model": "llama", "variants": ["ddl", "ddl"]}, "variants names 'ddl' twice"),
        ({"control": True, "seeds": [1, 1]}, "seeds names 1 twice"),
        ({"model": {"preset": "ddl-tiny"}}, "needs both"),
        ({"model": {"preset": "ddl-tiny", "tokenizer": "llama"}, "variants": ["ddl"]}, "with variants the SIZE alone"),
        ({"model": {"preset": "ddl-huge", "tokenizer": "llama"}}, "no size preset 'huge'"),
        ({"model": {"preset": "ddl-tiny", "tokenizer": "llama", "hidden_size": 63}}, "even rotary dimension"),
        ({"model": {"preset": "tiny", "tokenizer": "x"}, "variants": ["standard"], "control": True}, "drop one"),
    ],
)
def test_comparisons_that_make_no_sense(tmp_path, text, changes, words):
    folders = {"model": checkpoint(tmp_path / "model"), "llama": checkpoint(tmp_path / "llama", None)}
    settings = {**run_settings(folders["model"], tmp_path / "out", text), **changes}
    settings["data"]["eval_tokens"] = 60
    if settings["model"] == "llama":
        settings["model"] = str(folders["llama"])
    elif isinstance(settings["model"], dict) and settings["model"].get("tokenizer") == "llama":
        settings["model"] = {**settings["model"], "tokenizer": str(folders["llama"])}
    with pytest.raises(UserError, match=words):
        plan_arms(load_settings(settings))


def test_a_comparison_leaves_other_folders_alone(tmp_path, text):
    settings = run_settings(checkpoint(tmp_path / "model"), tmp_path / "out", text)
    with pytest.raises(UserError, match="needs held-out text"):
        train({**settings, "control": True})
    settings["data"]["eval_tokens"] = 60
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="holds no comparison"):
        train({**settings, "control": True})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_frozen_patterns_have_to_mean_something(tmp_path, text):
    model = checkpoint(tmp_path / "model")
    with pytest.raises(UserError, match="no parameter has a name like 'gaet'"):
        train(run_settings(model, tmp_path / "out", text, frozen=["gaet"]))
    with pytest.raises(UserError, match="no regular expression"):
        load_settings(run_settings(model, tmp_path / "out", text, frozen=["("]))


def test_patterns_that_suit_some_arms_only_are_left_out_of_the_others(tmp_path, text):
    """The control keeps what it can: frozen embeddings stay frozen, DDL's gates mean nothing to it."""
    model = checkpoint(tmp_path / "model", None, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text, steps=1, train="all")
    settings["data"]["eval_tokens"] = 30
    settings["optimisation"] |= {
        "frozen": ["embed_tokens", r"\.gate\."],
        "groups": [{"match": "attn_residual", "lr": 1e-3}, {"match": r"self_attn\.q_proj", "lr": 1e-4}],
        "anneal": {"erase": 1.0},
    }
    report = train({**settings, "control": True, "variants": ["ddl", "short_swa"]})
    start = load_file(model / "model.safetensors")
    for arm in report["arms"]:
        weights = load_file(tmp_path / "out" / f"{arm}-seed0" / "model.safetensors")
        assert torch.equal(weights["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
        assert not torch.equal(weights["model.norm.weight"], start["model.norm.weight"])
        own = json.loads((tmp_path / "out" / f"{arm}-seed0" / "training_report.json").read_text())
        rates = own["steps"][0]["learning_rates"]
        assert rates[r"self_attn\.q_proj"] == 1e-4
        assert ("attn_residual" in rates) == (arm == "ddl")
        erase = [value for name, value in weights.items() if name.endswith("erase")]
        assert bool(erase) == (arm == "ddl")
        assert all(value == 1 for value in erase)
    for wrong in ({"frozen": ["gaet"]}, {"groups": [{"match": "gaet", "lr": 1}]}, {"anneal": {"erasee": 1}}):
        settings["optimisation"] |= {"frozen": [], "groups": [], "anneal": {}, **wrong}
        with pytest.raises(
            UserError, match=r"No arm of this comparison has a parameter with a name like '(gaet|.*erasee)"
        ):
            train({**settings, "control": True, "variants": ["ddl"], "output": str(tmp_path / "other")})


def test_the_control_of_adapters_trains_adapters_and_nulls_hold_in_every_stage(tmp_path, text):
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", text, lora={"r": 2, "targets": ["q_proj"]})
    settings["data"]["eval_tokens"] = 30
    settings["stages"] = [
        {"name": "new", "steps": 1, "train": "new", "frozen": [r"\.gate\."]},
        {"name": "joint", "steps": 1, "train": "lora"},
    ]
    report = train({**settings, "control": True, "nulls": ["write_only"]})
    adapters = 2 * 2 * SIZE["hidden_size"] * SIZE["num_hidden_layers"]
    assert report["arms"]["control"]["trained"] == adapters
    weights = load_file(tmp_path / "out" / "ddl-write_only-seed0" / "model.safetensors")
    assert all(value == 0 for name, value in weights.items() if name.endswith("erase"))
    trained = load_file(tmp_path / "out" / "ddl-seed0" / "model.safetensors")
    assert any(value != 0 for name, value in trained.items() if name.endswith("erase"))
