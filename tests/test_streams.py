"""The command line where standard streams are closed, or cannot carry the text."""

import os
import subprocess
import sys

import pytest
import torch
from training_tools import IDENTITY_DDL, byte_tokenizer, checkpoint

from transformer2.errors import UserError

FORMAT = "{% for m in messages %}{{ m.content }} {% endfor %}"
START = "import sys; from transformer2_cli import main; main()"
COMMAND = f"'{sys.executable}' -c '{START}'"
    f"'{sys.executable}' -c 'import sys; sys.argv[0] = \"transformer2\"; from transformer2_cli import main; main()'"
)


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
