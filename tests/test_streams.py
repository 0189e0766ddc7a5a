"""The command line where standard streams are closed, or cannot carry the text."""

import os
import subprocess
import sys

import pytest
import torch
from training_tools import IDENTITY_DDL, byte_tokenizer, checkpoint, command, run_settings

from transformer2.errors import UserError
from transformer2.training.settings import load_settings

FORMAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
START = "import sys; from transformer2_cli import main; main()"
COMMAND = f"'{sys.executable}' -c '{START}'"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = byte_tokenizer()
    folder = checkpoint(
        tmp_path_factory.mktemp("streams") / "model", IDENTITY_DDL, dtype=torch.float32, vocab_size=len(tokenizer)
    )
    (folder / "generation_config.json").unlink()
    tokenizer.chat_template = FORMAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("generate {model} hello --max-new-tokens 2 <&-", 0, b"tokens in"),
        ("generate {model} - --max-new-tokens 2 <&-", UserError.exit_code, b"The prompt is empty"),
        ("generate {model} hello --max-new-tokens 2 >&-", 0, b"tokens in"),
        ("generate {model} hello --max-new-tokens 2 2>&-", 0, b""),
        ("chat {model} --max-new-tokens 2 <&-", 0, b""),
        ("echo hello | {command} chat {model} --max-new-tokens 2 >&-", 0, b"tokens in"),
        ("generate {model} $'\\xff\\xfe'", UserError.exit_code, b"not valid UTF-8, at character 1"),
        ("printf 'ab\\xff' | {command} generate {model} -", UserError.exit_code, b"not valid UTF-8, at character 3"),
        ("printf 'ab\\xff\\n' | {command} chat {model}", UserError.exit_code, b"not valid UTF-8, at character 3"),
        ("PYTHONIOENCODING=ascii {command} generate {model} Gödel --max-new-tokens 30", 0, b"30 tokens in"),
        ("chat {model} --seed -1 </dev/null", UserError.exit_code, b"seed must lie between"),
    ],
)
def test_streams(model, line, code, words):
    line = line if "{command}" in line else "{command} " + line
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shell = ["bash", "-c", line.format(command=COMMAND, model=model)]
    done = subprocess.run(shell, capture_output=True, env=environment, timeout=100)
    assert done.returncode == code, done.stderr
    assert b"Traceback" not in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_seeds_that_no_generator_takes(model, tmp_path, monkeypatch, capsys, seed):
    for arguments in (
        ("convert", model, tmp_path / "out", "--residual", "mudd"),
        ("init", "ddl-tiny", tmp_path / "out", "--tokenizer", model),
        ("generate", model, "hello"),
    ):
        code, _, error = command(monkeypatch, capsys, *arguments, "--seed", seed)
        assert code == UserError.exit_code
        assert f"The seed must lie between 0 and 2^32 - 1, got {seed}." in error
    for key in ("optimisation.seed", "data.hold_out_seed", "seeds"):
        settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt")
        section, _, name = key.rpartition(".")
        (settings[section] if section else settings)[name] = seed if section else [0, seed]
        with pytest.raises(UserError, match=rf"{key} must lie between 0 and 2\^32 - 1, got {seed}"):
            load_settings(settings)
    assert not (tmp_path / "out").exists()
