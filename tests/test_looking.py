"""Commands that show what there is: `variants`, `inspect --text --plot`, and `init` from a preset."""

import json

import pytest
import torch
from helpers import RESIDUALS, tiny_model, tokens
from training_tools import checkpoint, command, run_settings, words
from transformers import AutoConfig, AutoModelForCausalLM

from transformer2 import Transformer2Config
from transformer2 import training as package
from transformer2.configs import preset, variant
from transformer2.conversion.costs import cost
from transformer2.training.depth_report import depth_report
from transformer2.variants import AXES


def test_variants_lists_everything(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "variants", "--json")
    menu = json.loads(out)
    assert code == 0
    assert {axis: list(kinds) for axis, kinds in menu.items()} == {axis: list(kinds) for axis, kinds in AXES.items()}
    for axis, kinds in menu.items():
        for kind, entry in kinds.items():
            assert entry["source"] or (axis, kind) == ("local_mixer", "none")
            assert entry["bitwise"] == (kind != "mhc")
            assert all(option["about"] for option in entry["options"].values()), kind
    for arguments in ((), ("--presets",), ("--presets", "--json"), ("--model", "tiny")):
        code, out, _ = command(monkeypatch, capsys, "variants", *arguments)
        assert code == 0
        assert "attn_res" in out


# Extra parameters by the papers' formulas, for L layers of width D; none of ours where a read has one source.
FORMULAS = {
    "standard": lambda L, D: 0,
    "elc_bert": lambda L, D: (L + 1) * (L + 2) // 2 - 1,
    "denseformer": lambda L, D: L * (L + 3) // 2,
    "attn_res": lambda L, D: 2 * D * 2 * L,
    "hyper_connections": lambda L, D: 2 * L * (D * (4 + 3) + 4 * (4 + 2) + 2),
    "mhc": lambda L, D: 2 * L * (4 * D * (16 + 8) + 24 + 3),
    "dca": lambda L, D: sum(3 * D * (t + 1) for t in range(1, L + 1)) + D * (L + 2) + 3 * D * L,
    "laurel": lambda L, D: 2 * L * (2 * 32 * D + 2),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_extra_parameters_follow_the_papers(kind):
    config = preset("standard-1b")
    assert cost(config, kind)["extra_parameters"] == FORMULAS[kind](16, 2048)


def test_costs_of_a_model_that_some_presets_do_not_fit(monkeypatch, capsys, tmp_path):
    """Wide but of three layers, so the nearest size asks DenseFormer for averages every five blocks."""
    config = Transformer2Config(**{**preset("standard-8b").to_dict(), "num_hidden_layers": 3, "residual": "standard"})
    config.save_pretrained(tmp_path)
    code, out, _ = command(monkeypatch, capsys, "variants", "--model", tmp_path, "--json")
    assert code == 0
    residuals = json.loads(out)["residual"]
    assert "only 3 blocks" in residuals["denseformer"]["cost"]["not_applicable"]
    assert residuals["attn_res"]["cost"]["extra_parameters"] == 2 * 4096 * 6
    code, out, _ = command(monkeypatch, capsys, "variants", "--model", tmp_path)
    assert code == 0
    assert "only 3 blocks" in " ".join(out.split())
    code, _, err = command(monkeypatch, capsys, "variants", "--model", tmp_path / "nowhere")
    assert code == 2
    assert "There is no folder" in err


def test_operations_are_counted_right():
    """Against the usual count: two per weight and token, and two products of attention."""
    config = preset("standard-1b")
    layers, width, length = 16, 2048, 128
    weights = layers * (width * 2048 * 2 + width * 512 * 2 + 3 * width * 8192)
    expected = 2 * weights + layers * 4 * length * width
    assert cost(config)["flops_per_token"] == pytest.approx(expected, rel=0.02)
    # DenseFormer 1x1 makes one product and one addition per weight, source and feature.
    extra = cost(config, "denseformer")["extra_flops_per_token"]
    assert extra == pytest.approx(2 * 2048 * 16 * 19 / 2, rel=0.01)


@pytest.mark.parametrize("residual", ["attn_res", "dca", "mudd", "depth_swa", "ddl_cc", "hyper", "laurel_all"])
def test_inspect_draws_depth(residual, monkeypatch, capsys, tmp_path):
    folder = checkpoint(tmp_path / "model", RESIDUALS[residual], dtype=torch.float32, noise=0.3)
    (text := tmp_path / "text.txt").write_text(words(30))
    plot = tmp_path / "plot.png"
    code, out, err = command(monkeypatch, capsys, "inspect", folder, "--text", text, "--plot", plot, "--json")
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")
    depth = json.loads(out)["depth"]
    assert depth["tokens"] == 30
    rows = depth.get("rewrites") or depth["reads"]
    model = tiny_model(RESIDUALS[residual], noise=0.3, eos_token_id=1, bos_token_id=None)
    assert len(rows) == len(model(tokens(), output_depth_weights=True).depth_weights)
    code, out, _ = command(monkeypatch, capsys, "inspect", folder, "--text", text)
    assert code == 0
    assert "depth, over 30 tokens" in out


def test_depth_report_is_the_mean_of_what_the_model_returns(tmp_path):
    folder = checkpoint(tmp_path / "model", "attn_res", dtype=torch.float32, noise=0.3)
    (text := tmp_path / "text.txt").write_text(words(30))
    report = depth_report(folder, text, max_tokens=20)
    ids = torch.tensor([[int(word[1:]) for word in words(30).split()[:20]]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = model(ids, output_depth_weights=True).depth_weights
    assert [(read["layer"], read["site"]) for read in report["reads"]] == [
        *[(0, "mlp"), (1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp"), (None, "end")]
    ]
    for read, expected in zip(report["reads"], weights, strict=True):
        torch.testing.assert_close(torch.tensor(read["weights"]), expected.mean((2, 3)), atol=1e-6, rtol=1e-5)


def test_ddl_report(tmp_path):
    folder = checkpoint(tmp_path / "model", "ddl", dtype=torch.float32, noise=0.3)
    (text := tmp_path / "text.txt").write_text(words(30))
    for row in depth_report(folder, text)["rewrites"]:
        assert sum(row["gate_histogram"]) == pytest.approx(1)
        centres = [(index + 0.5) / 20 for index in range(40)]
        mean = sum(x * share for x, share in zip(centres, row["gate_histogram"], strict=True))
        assert row["gate_mean"] == pytest.approx(mean, abs=0.026)
        assert 0 < row["erase_share"] < 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--plot", "a.png"), "needs --text FILE"),
        (("--text", "{text}", "--plot", "a.docx"), "ends in .png, .pdf or .svg"),
        (("--text", "{text}", "--plot", "missing/a.png"), "missing/a.png cannot be used"),
        (("--text", "missing.txt"), "missing.txt"),
        (("--text", "{text}", "--max-tokens", "0"), "At least one token"),
    ],
)
def test_inspect_mistakes(arguments, sentence, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = checkpoint(tmp_path / "model", "attn_res")
    (text := tmp_path / "text.txt").write_text(words(30))
    code, _, err = command(monkeypatch, capsys, "inspect", folder, *[a.format(text=text) for a in arguments])
    assert code == 2
    assert sentence in " ".join(err.replace("│", " ").split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


def test_nothing_to_draw(monkeypatch, capsys, tmp_path):
    folder = checkpoint(tmp_path / "model", "standard")
    (text := tmp_path / "text.txt").write_text(words(30))
    code, _, err = command(monkeypatch, capsys, "inspect", folder, "--text", text)
    assert code == 2
    assert "nothing to draw" in err


def test_init_makes_a_model_that_trains(monkeypatch, capsys, tmp_path):
    tokenizer = checkpoint(tmp_path / "tokenizer", "standard")
    arguments = ("init", "mudd+short_swa-tiny", tmp_path / "new", "--tokenizer", tokenizer, "--seed", 3)
    code, out, err = command(monkeypatch, capsys, *arguments)
    assert code == 0, err
    config = AutoConfig.from_pretrained(tmp_path / "new")
    assert config.residual["type"] == "mudd"
    assert config.local_mixer["window"] == 8
    assert config.vocab_size == 101
    code, _, err = command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "exists" in err
    code, _, err = command(monkeypatch, capsys, *arguments[:2], tmp_path / "twin", *arguments[3:])
    first, twin = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("new", "twin"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), twin.parameters(), strict=True))

    (text := tmp_path / "text.txt").write_text((words(12) + " ") * 40)
    settings = run_settings(tmp_path / "new", tmp_path / "trained", text)
    settings["optimisation"]["train"] = "all"
    settings["optimisation"]["lr"] = {"new": 1e-2, "pretrained": 1e-2}
    report = package.train(settings)
    assert report["steps"][-1]["loss"] < report["steps"][0]["loss"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("mudd", "should read RESIDUAL-SIZE"), ("nothing-tiny", "no residual preset 'nothing'; choose one of: attn_res")],
)
def test_init_mistakes(name, sentence, monkeypatch, capsys, tmp_path):
    tokenizer = checkpoint(tmp_path / "tokenizer", "standard")
    code, _, err = command(monkeypatch, capsys, "init", name, tmp_path / "new", "--tokenizer", tokenizer)
    assert code == 2
    assert sentence in err
    assert not (tmp_path / "new").exists()
    code, _, err = command(monkeypatch, capsys, "init", "ddl-tiny", tmp_path / "new", "--tokenizer", tmp_path / "no")
    assert code == 2
    assert "There is no folder" in err


def test_convert_takes_a_preset(monkeypatch, capsys, tmp_path):
    source = checkpoint(tmp_path / "llama", None, dtype=torch.float32)
    out = tmp_path / "out"
    arguments = ("convert", source, out, "--verify", "L2")
    code, _, err = command(
        monkeypatch, capsys, *arguments, "--preset", "dca+short_swa-tiny", "--set", "residual.window=1"
    )
    assert code == 0, err
    config = Transformer2Config.from_pretrained(out)
    assert config.residual["window"] == 1
    assert config.residual["form"] == "identity"
    assert config.local_mixer["window"] == variant("local_mixer", "short_swa", "tiny")["window"]
    code, _, err = command(
        monkeypatch, capsys, *arguments, "--overwrite", "--preset", "dca-tiny", "--residual", "mudd"
    )
    assert code == 2
    assert "leave --residual and --local-mixer out" in " ".join(err.replace("│", " ").split())
    code, _, err = command(monkeypatch, capsys, *arguments, "--overwrite", "--preset", "dcb-tiny")
    assert code == 2
    assert "no residual preset 'dcb'" in " ".join(err.replace("│", " ").split())
