"""Every code block of the README and of docs/ is run, in order, on a tiny model; what is not run is listed here."""

import dataclasses
import io
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import tiny_llama
from training_tools import command, word_tokenizer

from transformer2.training.settings import Settings, load_settings

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NO_CODE = {"text"}
SHORTER = {  # what would take minutes
    "optimisation.steps=200": "optimisation.steps=2 data.sequence_length=32",
    "attn_res-135m": "attn_res-tiny",
    "--max-new-tokens 100": "--max-new-tokens 5",
}
NOT_RUN = {  # beginning of the line: why
    "make ": "the demonstration and the tests themselves",
    "pip install": "needs a package index",
    ". .venv/bin/activate": "this test is in the environment already",
    "transformer2 plan someone/model": "needs the Hub; tests/test_hub.py plans over HTTP",
    "transformer2 eval my-ddl --tasks": "needs data from the Hub; tests/test_metrics.py runs a local task",
    "accelerate launch": "needs GPUs; tests/test_sharding.py reads the configurations",
    "torchrun": "tests/test_training_loss.py starts two processes",
}
CHAT = "{% for m in messages %}w5 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w6{% endif %}"


def blocks(page: str, language: str | None = None) -> list[tuple[str, str]]:
    """(language, code) of every block of a page."""
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) == (ROOT / page).read_text(encoding="utf-8").count("```") // 2, (
        f"a block of {page} has no language"
    )
    return [(kind, code) for kind, code in found if language in (None, kind)]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    """A folder with what the pages talk about: a Llama, a corpus, a held-out text, train.yaml."""
    folder = tmp_path_factory.mktemp("docs")
    llama = folder / "path" / "to" / "llama"
    tiny_llama(dtype=torch.bfloat16, eos_token_id=1, bos_token_id=None).save_pretrained(llama)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(llama)
    generator = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in generator.integers(3, 101, 40)) for _ in range(600)]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    (folder / "corpus.jsonl").write_text(lines)
    (folder / "held_out.jsonl").write_text(lines[:20_000].rpartition("\n")[0])
    (folder / "held-out.txt").write_text("\n".join(texts[:20]))
    (train,) = [code for _, code in blocks("README.md", "yaml")]
    (folder / "train.yaml").write_text(train)
    return folder


def test_code_blocks(sandbox, monkeypatch, capsys):
    """The README comes first: other pages go on with what it made."""
    monkeypatch.chdir(sandbox)
    for page in PAGES:
        for language, code in blocks(page):
            if language == "python":
                exec(compile(code, page, "exec"), {})
            elif language == "yaml":
                load_settings(yaml.safe_load(code))
            elif language in ("console", "bash"):
                for line in code.splitlines():
                    run_line(line, monkeypatch, capsys)
            else:
                assert language in NO_CODE, f"{page}: who runs {language}?"


def run_line(line: str, monkeypatch, capsys) -> None:
    if any(line.startswith(beginning) for beginning in NOT_RUN):
        return
    for long, short in SHORTER.items():
        line = line.replace(long, short)
    words = shlex.split(line, comments=True)
    assert words[0] == "transformer2", line
    if words[1] == "convert" and Path(words[3]).exists():
        words.append("--overwrite")
    monkeypatch.setattr(sys, "stdin", io.StringIO("w7 w8\n/exit\n"))
    code, _, error = command(monkeypatch, capsys, *words[1:])
    assert code == 0, f"{line}: {error}"


def test_what_is_not_run_or_shortened_is_still_there():
    code = "\n".join(code for page in PAGES for _, code in blocks(page))
    for beginning in NOT_RUN:
        assert re.search(rf"^{re.escape(beginning)}", code, re.MULTILINE) or beginning == "pip install", beginning
    for long in SHORTER:
        assert long in code


def test_every_setting_is_explained():
    """The tables of docs/training.md have every key with its default, and no other."""

    def keys(settings, prefix=""):
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if dataclasses.is_dataclass(value):
                yield from keys(value, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", value

    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", (ROOT / "docs/training.md").read_text(), re.MULTILINE)
    stated = {key: None if value == "(required)" else yaml.safe_load(value) for key, value in rows}
    actual = dict(keys(Settings()))
    assert sorted(stated) == sorted(actual)
    for key, value in actual.items():
        assert stated[key] == value or (stated[key] is None and value == "") or float(stated[key]) == value, key


def test_links_lead_somewhere():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target:
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_tests_that_are_named_exist():
    text, file = (ROOT / "docs/testing.md").read_text(encoding="utf-8").partition("## Failures")[2], ""
    found = re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", text)
    for name, function in found:
        file = name or file
        if name or function:
            assert f"def {function or 'test_'}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (
                file,
                function,
            )
    assert len([function for _, function in found if function]) > 20
