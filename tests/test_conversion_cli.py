"""The commands: results on stdout, the rest on stderr, one sentence and an exit code for what goes wrong."""

import io
import json
import subprocess
import sys

import pytest
from helpers import tiny_model
from typer import BadParameter

import transformer2_cli
from transformer2 import conversion
from transformer2_cli.conversion import parse_settings, parse_value, progress_bar, show_checks


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process -> exit code, stdout, stderr."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["transformer2", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            transformer2_cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return command


def test_convert_verify_inspect(run, llama_folder, tmp_path):
    output = tmp_path / "out"
    options = ["--residual", "ddl", "--set", "residual.value_channels=2", "--local-mixer", "short_swa"]
    options += ["--set", "local_mixer.layers=[0, 2]", "--set", "local-mixer.window=4", "--seed", "5", "--json"]
    code, out, err = run("convert", llama_folder, output, *options, "--verify", "L1")
    report = json.loads(out)
    assert code == 0
    assert report["residual"]["value_channels"] == 2
    assert report["residual"]["form"] == "identity"
    assert (report["local_mixer"]["layers"], report["local_mixer"]["window"]) == ([0, 2], 4)
    assert report["verification"]["passed"]
    assert "Verification L1" in err
    assert "tensor bytes" in err
    assert "pass ok" not in err
    assert "neither a residual nor" not in err

    code, out, err = run("verify", llama_folder, output, "--level", "L1", "--json")
    assert code == 0
    assert json.loads(out)["passed"]
    code, out, _ = run("verify", llama_folder, output, "--level", "L0")
    assert (code, out) == (0, f"{output}: all 5 checks up to L0 hold.\n")

    code, out, _ = run("inspect", output, "--json")
    assert code == 0
    assert json.loads(out)["provenance"]["options"]["seed"] == 5
    code, out, _ = run("inspect", output)
    assert 'residual: ddl\n    form = "identity"\n    value_channels = 2\n' in out
    assert "mlp erase: min 0, mean 0, max 0" in out
    assert "made from llama by transformer2" in out

    (output / "stray").touch()
    code, out, err = run("verify", llama_folder, output, "--level", "L0", "--json")
    assert code == 1
    assert json.loads(out)["failures"] == ["L0 files: stray is not part of the conversion"]
    assert err.splitlines()[-1].startswith(f"Error: {output} does not hold up: L0 files")


def test_a_proof_that_a_newcomer_understands(capsys):
    def check(level, name, detail, passed=True):
        return {"level": level, "name": name, "detail": detail, "passed": passed}

    checks = [check("L0", "base tensors", "ok"), check("L2", "float32 left_padded", "bit-equal on 56 tokens")]
    show_checks({"level": "L3", "seconds": 1, "checks": [*checks, check("L3", "step 0", "x[1]", passed=False)]})
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().err.splitlines()]
    assert "L0 structure base tensors pass" in rows
    assert "L2 logits float32 left padded pass bit-equal on 56 tokens" in rows
    assert "L3 gradients step 0 FAIL x[1]" in rows


def test_without_a_choice_the_plain_model_is_made_and_called_so(run, llama_folder, tmp_path):
    code, _, err = run("convert", llama_folder, tmp_path / "out", "--verify", "l1")  # levels in any case
    assert code == 0
    assert "Note: neither a residual nor a local mixer was chosen, so this keeps the source's" in err
    assert "Verification L1" in err
    code, out, _ = run("verify", llama_folder, tmp_path / "out", "--level", "l0")
    assert out.endswith("checks up to L0 hold.\n")


def test_version(run):
    from importlib import metadata

    code, out, _ = run("--version")
    assert (code, out) == (0, f"transformer2 {metadata.version('transformer2')}\n")


def test_a_model_from_scratch_has_nothing_new(run, tmp_path):
    tiny_model({"type": "ddl"}).save_pretrained(tmp_path / "scratch")
    code, out, _ = run("inspect", tmp_path / "scratch")
    assert code == 0
    assert "new" not in out
    assert "in residuals and local mixers; not made by a conversion" in out
    code, out, _ = run("inspect", tmp_path / "scratch", "--json")
    assert "new_parameters" not in json.loads(out)
    assert json.loads(out)["variant_parameters"] > 0


def test_failed_proof_exits_with_1(run, llama_folder, tmp_path, monkeypatch):
    from transformer2.conversion import retrofit

    check = {"level": "L0", "name": "index", "passed": False, "detail": "total_size is [1]"}
    result = {"level": "L0", "passed": False, "failures": ["L0 index: bad"], "checks": [check], "seconds": 0.1}
    monkeypatch.setattr(retrofit, "run_checks", lambda *a, **k: result)
    code, out, err = run("convert", llama_folder, tmp_path / "out", "--verify", "L0", "--json")
    assert code == 1
    assert json.loads(out) == {"output": None, "verification": result}
    assert "FAIL total_size is [1]" in err
    assert err.splitlines()[-1] == "Error: Verification failed, so nothing was written: L0 index: bad"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--residual", "dll"], "Error: Unknown residual type 'dll'; choose one of: standard, elc_bert, denseformer,"),
        (["--residual", "ddl", "--set", "residual.value_channels=0"], "Error: DDL needs at least one value channel"),
        (["--local-mixer", "short_swa", "--set", "local_mixer.window=0"], "Error: ShortSWA's window"),
        (["--residual", "ddl", "--set", "residual.from=paper"], "Error: residual 'ddl' has no option 'from'"),
        (["--verify", "L8"], "Error: Unknown verification level 'L8'"),
        (["--set", "value_channels=4"], "should read residual.KEY=VALUE"),
    ],
)
def test_bad_usage_exits_with_2(run, llama_folder, tmp_path, arguments, sentence):
    code, out, err = run("convert", llama_folder, tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


def test_full_disk_exits_with_3(run, llama_folder, tmp_path, monkeypatch):
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    code, out, err = run("convert", llama_folder, tmp_path / "out", "--residual", "ddl")
    assert (code, out) == (3, "")
    assert err.splitlines()[-1].startswith("Error: ")


def test_variants_lists_the_menu(run):
    code, out, _ = run("variants", "--json")
    menu = json.loads(out)
    assert code == 0
    assert {"standard", "ddl", "short_swa"} <= set(menu["residual"])
    assert {"none", "short_swa"} <= set(menu["local_mixer"])
    assert menu["residual"]["ddl"]["options"]["value_channels"] == {
        "type": "a whole number",
        "default": 1,
        "about": "d_v, the channels of the state.",
    }
    assert menu["local_mixer"]["short_swa"]["options"]["mask"]["type"] == "one of: sliding, chunk"
    assert menu["residual"]["ddl"]["about"].startswith("Deep Delta Learning")
    code, out, _ = run("variants")
    assert "--set residual.value_channels=1    (a whole number)" in out


def test_settings():
    values = {"4": 4, "1e-5": 1e-5, ".5": 0.5, "true": True, "False": False, "null": None, "None": None}
    values |= {"linear": "linear", '"4"': "4", "[0, 2]": [0, 2], "[a, b]": ["a", "b"], "[]": [], "a=b": "a=b"}
    for text, value in values.items():
        parsed = parse_value(text)
        assert parsed == value
        assert type(parsed) is type(value)
    choices = parse_settings("ddl", "none", ["residual.value=linear", "residual.k_eps=1e-6"])
    assert choices == {"residual": {"type": "ddl", "value": "linear", "k_eps": 1e-6}, "local_mixer": {"type": "none"}}
    for wrong in ("value_channels=4", "residual.x", "depth.x=1", "residual.=1"):
        with pytest.raises(BadParameter, match="should read"):
            parse_settings("ddl", "none", [wrong])


def test_interrupted(run, llama_folder, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "convert", interrupted)
    code, out, err = run("convert", llama_folder, tmp_path / "out")
    assert (code, out) == (130, "")
    assert err.strip() == "Interrupted; no file was left half-written."


def test_help_needs_neither_torch_nor_transformers():
    script = (
        "import sys; from transformer2_cli import app\n"
        "try: app(['convert', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'transformers', 'transformer2'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0
    assert "--materialize" in run.stdout


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_counts_bytes_on_a_terminal(llama_folder, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("rich.progress.Progress.advance", lambda bar, task, count: told.append(count))
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with progress_bar() as tell:
        conversion.convert(
            llama_folder, tmp_path / "out", residual="ddl", verify="L1", materialize="copy", progress=tell
        )
    assert "Comparing bytes" in screen.getvalue()
    assert sum(told) >= 3 * (llama_folder / "model.safetensors").stat().st_size  # copied once, hashed on both sides


def test_progress_without_a_terminal_is_a_line_per_step(capsys):
    with progress_bar() as tell:
        tell("Comparing logits")
        tell("Layer 1 of 80")
    assert capsys.readouterr().err == "Comparing logits\n"
