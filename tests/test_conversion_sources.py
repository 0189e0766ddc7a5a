"""Which sources are taken, and what is said about the others: one sentence each, and nothing is written."""

import json
import struct

import pytest
import torch
from helpers import tiny_llama
from safetensors.torch import load_file, save_file

from transformer2.conversion import convert, verify
from transformer2.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def source(llama_folder):
    return llama_folder


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(source, match, **options):
    output = source.parent / "out"
    before = sorted(source.parent.iterdir())
    with pytest.raises(UserError, match=match) as error:
        convert(source, output, **{"residual": "ddl", "verify": "L0", **options})
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert sorted(source.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "bert"}, "config.json says 'bert', and only these can be converted: llama, mistral, qwen2,"),
        ({"model_type": "mistral"}, "Of mistral models, only MistralForCausalLM .* says LlamaForCausalLM"),
        ({"model_type": "qwen3", "architectures": None}, "lacks tensors .*k_norm"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "only LlamaForCausalLM .*Classification",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "code of its own"),
        ({"vocab_size": 103}, r"model.embed_tokens.weight has shape \[101, 32\], but config.json implies \[103, 32\]"),
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape \[16, 32\]"),
        ({"head_dim": 16}, r"q_proj.weight has shape \[32, 32\]"),
        ({"num_hidden_layers": 2}, "tensors that a llama of its config does not have: model.layers.2"),
        ({"num_hidden_layers": 4}, "lacks tensors that its config implies: model.layers.3"),
        ({"attention_bias": True}, "lacks tensors .*bias"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "transformers"),
        ({"tie_word_embeddings": "maybe"}, "transformers refuses the source's config.json"),
    ],
)
def test_config_does_not_fit(source, changes, match):
    edit_config(source, **changes)
    refused(source, match)


def test_name_of_the_folder_does_not_matter(source):
    renamed = source.rename(source.parent / "my-mistral.v0.1")
    assert convert(renamed, source.parent / "out", residual="ddl", verify="L0")["source"]["name"] == "my-mistral.v0.1"


def test_unexpected_tensors_are_named(source):
    edit_tensors(source, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    refused(source, "does not have: model.layers.0.self_attn.q_norm.weight")


def test_rotary_frequencies_of_old_checkpoints_are_kept(source):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(source, lambda t: t.update({name: torch.ones(4)}))
    output = source.parent / "out"
    report = convert(source, output, residual="ddl", verify="L0")
    assert report["warnings"] == ["1 stored rotary frequencies are kept but never read."]
    assert verify(source, output, "L2", fresh_process=False)["passed"]


def test_integer_weights_are_refused(source):
    edit_tensors(source, lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.int8)}))
    refused(source, "stored as I8: the source is quantised")


def test_broken_files(source):
    weights = source / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    refused(source, "model.safetensors is truncated: .* bytes are there")
    weights.write_bytes(content[:50])
    refused(source, "truncated, its header being cut off")
    weights.write_bytes(struct.pack("<Q", 4) + b"oops" + content)
    refused(source, "no readable safetensors file")
    weights.write_bytes(b"")
    refused(source, "no readable safetensors file")
    weights.write_bytes(content)
    (source / "config.json").write_text("{")
    refused(source, "config.json is not valid JSON")
    (source / "config.json").unlink()
    refused(source, "has no config.json")


def test_shards_that_do_not_match_their_index(source):
    tiny_llama().save_pretrained(source, max_shard_size="45KB")
    (source / "model.safetensors").unlink(missing_ok=True)
    index_file = source / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shards = sorted(source.glob("model-*.safetensors"))
    moved = shards[1].rename(source / "elsewhere")
    refused(source, f"The shard {shards[1].name} .* is missing")
    moved.rename(shards[1])
    shorter = {name: shard for name, shard in index["weight_map"].items() if name != HEAD}
    index_file.write_text(json.dumps({"weight_map": shorter}))
    refused(source, f"holds {HEAD}, which .* does not list")
    index_file.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": shards[0].name}}))
    refused(source, "lists tensor more in")
    index_file.write_text(json.dumps({"weight_map": {**index["weight_map"], "more": "../out.safetensors"}}))
    refused(source, "not a file of its own folder")


def test_pickled_weights_come_with_the_command(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(source, r"convert them first: python -c .*from_pretrained\('.*llama'")
    (source / "pytorch_model.bin").unlink()
    refused(source, "has no weights")


def test_places_without_a_model(source, tmp_path):
    with pytest.raises(UserError, match="There is no folder ./nowhere"):
        convert("./nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="is a file: give the folder"):
        convert(source / "config.json", tmp_path / "out")
    with pytest.raises(UserError, match="Hub cannot be reached"):  # conftest: offline
        convert("someone/some-llama", tmp_path / "out")
    with pytest.raises(UserError, match="nor the name of a model on the Hub"):
        convert("some llama", tmp_path / "out")
    with pytest.raises(UserError, match="--revision"):
        convert(source, tmp_path / "out", revision="main")
    assert not (tmp_path / "out").exists()


def test_hub_snapshot_is_followed_through_its_links(source, tmp_path, monkeypatch):
    import huggingface_hub

    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(file)
    seen = {}

    def snapshot_download(repo_id, revision, ignore_patterns):
        seen.update(repo_id=repo_id, revision=revision, ignore_patterns=ignore_patterns)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    output = tmp_path / "out"
    report = convert("someone/llama", output, residual="ddl", verify="L1", revision="v1", materialize="link")
    assert report["source"] == {"name": "someone/llama", "commit": commit, "gguf": None}
    assert (seen["repo_id"], seen["revision"]) == ("someone/llama", "v1")
    assert {"*.bin", "*.pt", "*.py", "*.gguf"} <= set(seen["ignore_patterns"])
    assert not any(file.is_symlink() for file in output.iterdir())
    assert (output / "model-00001-of-00002.safetensors").samefile(source / "model.safetensors")


def tied_source(folder, config_tie, tensors):
    tiny_llama(tie_word_embeddings=False).save_pretrained(folder)
    edit_config(folder, tie_word_embeddings=config_tie)

    def change(stored):
        if tensors == "both equal":
            stored[HEAD] = stored[EMBEDDING].clone()
        elif tensors == "embed only":
            del stored[HEAD]
        elif tensors == "head only":
            del stored[EMBEDDING]

    edit_tensors(folder, change)
    return folder


@pytest.mark.parametrize(
    ("config_tie", "tensors", "written"),
    [
        (True, "embed only", True),
        (True, "both equal", True),
        (True, "both different", False),
        (True, "head only", True),
        (False, "both different", False),
        (False, "both equal", False),
    ],
)
def test_tied_embeddings_truthfully(tmp_path, config_tie, tensors, written):
    source, output = tied_source(tmp_path / "llama", config_tie, tensors), tmp_path / "out"
    report = convert(source, output, residual="ddl", verify="L0")
    assert report["tie_word_embeddings"] is written
    assert json.loads((output / "config.json").read_text())["tie_word_embeddings"] is written
    assert report["base_parameters"] == (26496 if written else 29728)
    expected = {(True, "both equal"): "repeats the tied", (True, "both different"): "written as false"}
    notes = expected.get((config_tie, tensors))
    assert (len(report["warnings"]) == 1 and notes in report["warnings"][0]) if notes else not report["warnings"]
    result = verify(source, output, "L3", fresh_process=False)
    assert result["passed"], result["failures"]


def test_missing_head_needs_a_word_from_the_user(tmp_path):
    source, output = tied_source(tmp_path / "llama", False, "embed only"), tmp_path / "out"
    refused(source, "--assume-tied")
    report = convert(source, output, residual="ddl", verify="L0", assume_tied=True)
    assert report["tie_word_embeddings"] is True
    assert "--assume-tied" in report["warnings"][0]
    assert verify(source, output, "L2", fresh_process=False)["passed"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"residual": "dll"}, "Unknown residual type 'dll'; choose one of: standard, elc_bert, denseformer"),
        (
            {"local_mixer": "conv"},
            "Unknown local_mixer type 'conv'; choose one of: none, short_conv, canon",
        ),
        (
            {"residual": {"type": "ddl", "chanels": 4}},
            "no option 'chanels'; its options are: form, value_channels",
        ),
        ({"residual": {"type": "ddl", "value_channels": 0}}, "at least one value channel, got value_channels=0"),
        ({"residual": {"type": "ddl", "value_channels": "4"}}, "must be a whole number, got '4'"),
        ({"local_mixer": {"type": "short_swa", "window": 0}}, "window"),
        ({"residual": {"type": "short_swa", "window": 0}}, "window"),
        ({"residual": {"type": "standard", "form": "identity"}}, "no option 'form'"),
        ({"verify": "L9"}, "Unknown verification level 'L9'; choose one of: L0, L1, L2, L3"),
        (
            {"materialize": "teleport"},
            "materialise 'teleport'; choose one of: auto, link, reflink, copy",
        ),
    ],
)
def test_bad_options(source, options, match):
    refused(source, match, **options)
