"""Sources, outputs and records that somebody has damaged or mistaken: one sentence each, and nothing is lost."""

import json

import pytest
from helpers import tiny_llama
from training_tools import command, word_tokenizer

from transformer2.conversion import convert, plan, strip, verify
from transformer2.conversion.publishing import discard
from transformer2.errors import UserError

NAME = "transformer2_conversion.json"


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    tiny_llama().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def edit(file, **fields):
    tree = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def test_bytes_behind_the_last_tensor(llama, tmp_path):
    with open(llama / "model.safetensors", "ab") as shard:
        shard.write(b"ab")
    words = "has 2 bytes more than its header says; download it again"
    assert words in plan(llama, residual="ddl")["refusal"]
    with pytest.raises(UserError, match=words):
        convert(llama, tmp_path / "out", residual="ddl", verify="L0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"num_attention_heads": 0}, "transformers refuses the source's config.json"),
        ("config.json", {"model_type": None}, "config.json names no model_type"),
        ("config.json", {"hidden_act": "foo"}, "look for a name or number there that this transformers does not know"),
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON; download it again"),
        ("tokenizer.json", "{" + " " * 5_000_000, "tokenizer.json is not valid JSON; download it again"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("model.safetensors", "x" * 100, "or is no safetensors file; download it again"),
    ],
)
def test_broken_files_of_a_source(llama, tmp_path, file, content, words):
    if isinstance(content, str):
        (llama / file).write_text(content)
    else:
        edit(llama / file, **content)
    with pytest.raises(UserError, match=words):
        convert(llama, tmp_path / "out", residual="ddl", verify="L1")
    assert not (tmp_path / "out").exists()


def test_shards_without_an_index(llama, tmp_path):
    (llama / "model.safetensors").rename(llama / "model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="has shards, but model.safetensors.index.json is missing"):
        convert(llama, tmp_path / "out", residual="ddl")


def test_a_record_that_lists_no_files(llama, tmp_path):
    out = tmp_path / "out"
    convert(llama, out, residual="ddl", verify="L1")
    record = (out / NAME).read_text()
    for broken in ("{}", json.dumps({**json.loads(record), "files": 3})):
        (out / NAME).write_text(broken)
        assert not verify(llama, out, "L1")["passed"]
        with pytest.raises(UserError, match="is broken: it does not list the files; convert the source again"):
            strip(out, tmp_path / "back")


def test_what_is_not_ours_is_not_replaced(llama, tmp_path):
    other = tmp_path / "other"
    tiny_llama(seed=3).save_pretrained(other)
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds a model that transformer2 has not written, so it is not replaced"):
        convert(llama, other, residual="ddl", overwrite=True)
    assert (other / "notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="already exists"):
        convert(llama, llama, residual="ddl")
    with pytest.raises(UserError, match="has not written, so it is not replaced"):
        convert(llama, llama, residual="ddl", overwrite=True)
    ours = tmp_path / "ours"
    for residual in ("ddl", "mudd"):
        convert(llama, ours, residual=residual, verify="L1", overwrite=True)
    assert json.loads((ours / "config.json").read_text())["residual"]["type"] == "mudd"


def test_an_old_output_goes_though_parts_of_it_are_read_only(tmp_path):
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "old" / "deep" / "file").touch()
    (tmp_path / "old" / "deep").chmod(0o500)
    discard(tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_a_mistaken_or_weaker_check_leaves_the_proof_alone(llama, tmp_path):
    out, wrong = tmp_path / "out", tmp_path / "wrong"
    convert(llama, out, residual="ddl", verify="L3")
    tiny_llama(num_hidden_layers=2).save_pretrained(wrong)
    proof = (out / "verification.json").read_text()
    mistaken = verify(wrong, out, "L0")
    assert not mistaken["passed"]
    (note,) = mistaken["notes"]
    assert note == "This is not the source that the conversion recorded, so verification.json was left alone."
    weaker = verify(llama, out, "L1")
    assert weaker["passed"]
    assert weaker["notes"] == ["verification.json keeps the proof of L3."]
    assert (out / "verification.json").read_text() == proof
    (out / "tokenizer.json").write_text("{}")  # a real fault is recorded
    assert not verify(llama, out, "L1")["passed"]
    assert not json.loads((out / "verification.json").read_text())["passed"]


def test_a_form_that_starts_elsewhere_is_told(llama, tmp_path):
    report = convert(llama, tmp_path / "out", residual={"type": "ddl", "form": "paper"}, verify="L1")
    assert any("the output computes something else" in note for note in report["warnings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "{llama}", "{out}", "--level", "L1", "--text", "{llama}/config.json"), "scored at L4 only"),
        (("verify", "{llama}", "{out}", "--level", "L4", "--text", "nowhere.txt"), "There is no file nowhere.txt"),
        (("convert", "", "{out}2", "--residual", "ddl"), "A path is empty"),
        (("convert", "{llama}", "", "--residual", "ddl"), "A path is empty"),
        (("convert", "{llama}", "{out}2", "--set", "residual.type=ddl"), "the type is given by --residual ddl"),
        (("convert", "{llama}", "{out}2", "--max-shard-size", "0"), "write it as 5GB or 500MB, more than nothing"),
    ],
)
def test_options(llama, tmp_path, monkeypatch, capsys, arguments, words):
    convert(llama, tmp_path / "out", residual="ddl", verify="L0")
    filled = [part.format(llama=llama, out=tmp_path / "out") for part in arguments]
    code, _, error = command(monkeypatch, capsys, *filled)
    assert code == UserError.exit_code
    assert words in error
    assert not (tmp_path / "out2").exists()
