"""Packaging: what a wheel and an editable install contain, and that the command starts without the heavy imports."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "modeling": "transformer2",
    "configs": "transformer2/configs",
    "conversion": "transformer2/conversion",
    "training": "transformer2/training",
    "model_cards": "transformer2/model_cards",
    "cli": "transformer2_cli",
}


def run(*command: str, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources, so that nothing is left behind in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", *FOLDERS, "*.toml", "README.md", "LICENSE"], cwd=ROOT, capture_output=True
    )
    for name in tracked.stdout.decode().split():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in FOLDERS.items():
        suffixes = (".py", ".typed", ".yaml", ".json", ".jinja")
        files = [str(p.relative_to(ROOT / folder)) for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
        assert files
        for file in files:
            assert f"{package}/{file}" in names
    assert not [name for name in names if name.startswith(("tests/", "modeling/", "benchmarks/"))]


def test_the_wheel_works(wheel, tmp_path):
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path))
    run(*pip, str(wheel))
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
        "import transformer2, transformer2_cli, transformer2.conversion, transformer2.training\n"
        "for module in (transformer2, transformer2_cli, transformer2.conversion):\n"
        "    assert module.__file__.startswith(sys.argv[1])\n"
        "from transformers import AutoConfig\n"
        "assert AutoConfig.for_model('transformer2', num_hidden_layers=2).residual == {'type': 'standard'}\n"
    )
    run(sys.executable, "-c", script, str(tmp_path), cwd=tmp_path)


def test_the_editable_install_works():
    script = (
        "import transformer2, transformer2.configs, transformer2.conversion, transformer2.training\n"
        "import transformer2.model_cards, transformer2_cli; print(transformer2.__file__)"
    )
    assert run(sys.executable, "-c", script, cwd="/").stdout.strip().endswith("__init__.py")


def test_the_command_starts_without_torch():
    """`transformer2 --help` must answer at once, so it may not import torch or transformers."""
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom transformer2_cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'convert' in result.output and 'train' in result.output\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'transformer2'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run(sys.executable, "-c", script, cwd="/")


def test_the_module_is_the_command():
    assert "verify" in run(sys.executable, "-m", "transformer2", "--help", cwd="/").stdout


def test_the_folder_is_not_the_package():
    script = "import modeling"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode != 0
    assert "Import this package as `transformer2`" in result.stderr


def test_every_folder_is_listed():
    text = (ROOT / "pyproject.toml").read_text()
    for folder, package in FOLDERS.items():
        assert (ROOT / folder / "__init__.py").is_file()
        assert f'= "{folder}"' in text, package
