"""What a conversion carries along besides weights: both forms of chat templates, eos lists, licence, provenance."""

import json
import shlex

import pytest
import yaml
from helpers import tiny_llama
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from transformer2 import Transformer2Config
from transformer2.conversion import convert, sources, verify
from transformer2.conversion.checkpoints import PROVENANCE
from transformer2_cli import app

TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
README = """---
license: other
license_name: strange-licence
license_link: LICENSE
language: [en, de]
datasets: [secret]
pipeline_tag: text-generation
---
# Base
"""


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "llama"
    tiny_llama(eos_token_id=[2, 7]).save_pretrained(folder)
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_end|>"],
    )
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(README)
    (folder / "LICENSE").write_bytes(b"terms\r\n")
    settings = GenerationConfig(eos_token_id=[2, 7], temperature=0.6, do_sample=True)
    settings.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["file", "config", "both"])
def test_chat_template_in_both_forms(source, tmp_path, form):
    if form in ("file", "both"):
        (source / "chat_template.jinja").write_text(TEMPLATE)
    if form in ("config", "both"):
        settings = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    convert(source, tmp_path / "out", residual="ddl", verify="L1")
    messages = [{"role": "user", "content": "a"}]
    old, new = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert new.apply_chat_template(messages, tokenize=False) == "<user>a"
    assert new.special_tokens_map == old.special_tokens_map
    assert "<|im_end|>" in new.all_special_tokens


def test_eos_lists_are_kept(source, tmp_path):
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.eos_token_id, settings.temperature) == ([2, 7], 0.6)
    assert Transformer2Config.from_pretrained(tmp_path / "out").eos_token_id == [2, 7]
    assert (tmp_path / "out" / "LICENSE").read_bytes() == b"terms\r\n"


def front_matter(folder):
    _, header, body = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), body


def test_licence_metadata_goes_along(source, tmp_path):
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    metadata, body = front_matter(tmp_path / "out")
    assert metadata == {
        "license": "other",
        "license_name": "strange-licence",
        "license_link": "LICENSE",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": ["transformer2"],
    }
    assert "residual `ddl`" in body
    assert "BASE_README.md" in body
    assert str(tmp_path) not in body
    (tmp_path / "out" / "README.md").write_text("# Mine")  # it is the user's
    assert verify(source, tmp_path / "out", "L1")["passed"]


@pytest.mark.parametrize("readme", ["no metadata", "---\n: [broken\n---\n", "---\n- a list\n---\n", ""])
def test_readme_without_metadata(source, tmp_path, readme):
    (source / "README.md").write_text(readme)
    convert(source, tmp_path / "out", residual="ddl", verify="L0")
    assert front_matter(tmp_path / "out")[0] == {"library_name": "transformers", "tags": ["transformer2"]}


def test_base_model_and_commit(source, tmp_path, monkeypatch):
    found = sources.Source(source, "someone/llama", commit="c0ffee")
    monkeypatch.setattr(sources, "_download", lambda repo_id, revision: found)
    convert("someone/llama", tmp_path / "out", residual="ddl", verify="L0")
    metadata, body = front_matter(tmp_path / "out")
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("someone/llama", "finetune")
    assert "someone/llama (commit c0ffee)" in body
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["converted_from"]["name"] == "someone/llama"
    assert config["converted_from"]["commit"] == "c0ffee"
    record = json.loads((tmp_path / "out" / PROVENANCE).read_text())
    assert record["source"]["commit"] == "c0ffee"
    assert "--revision c0ffee" in record["command"]
    assert verify(source, tmp_path / "out", "L1")["passed"]


def test_the_recorded_command_converts_likewise(source, tmp_path, monkeypatch):
    residual = {"type": "ddl", "value_channels": 4, "compress": "tokens"}
    mixer = {"type": "short_swa", "window": 8, "layers": [0, 2]}
    options = {"seed": 3, "dtype": "bfloat16", "max_shard_size": "40kB", "verify": "L0"}
    convert(source, tmp_path / "out", residual=residual, local_mixer=mixer, **options)
    command = shlex.split(json.loads((tmp_path / "out" / PROVENANCE).read_text())["command"])
    assert command[:4] == ["transformer2", "convert", "llama", "OUT"]
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, [*command[1:], "--verify", "L0"])
    assert run.exit_code == 0, run.output
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "OUT" / file.name).read_bytes()
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "OUT"))
    assert first == second
