"""Converted folders: what is in them, byte for byte, and that they compute what their source computes."""

import hashlib
import json
import re

import pytest
import torch
from helpers import IDENTITY_MIXERS, IDENTITY_RESIDUALS, LOCAL_MIXERS, RESIDUALS, tiny_llama, tokens
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from transformer2 import RESIDUALS as RESIDUAL_MENU
from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion import convert, inspect_checkpoint, verify
from transformer2.errors import UserError

BOTH = {"residual": "ddl", "local_mixer": {"type": "short_swa", "window": 8}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SOURCES = {
    "untied": ({}, torch.float32, 1),
    "tied": ({"tie_word_embeddings": True}, torch.bfloat16, 3),
    "mqa": ({"num_key_value_heads": 1}, torch.float16, 1),
    "mha": ({"num_key_value_heads": 4, "tie_word_embeddings": True}, torch.float32, 3),
    "head_dim": ({"head_dim": 16}, torch.bfloat16, 1),
    "biases": ({"attention_bias": True, "mlp_bias": True}, torch.bfloat16, 3),
    "linear": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, torch.float32, 1),
    "llama3": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, torch.bfloat16, 1),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}}, torch.float32, 1),
}


def save_llama(folder, dtype=torch.float32, shards=1, **overrides):
    """A tiny Llama on disk, in one file or in three."""
    size = "45KB" if dtype == torch.float32 else "22KB"
    tiny_llama(dtype=dtype, **overrides).save_pretrained(folder, **({} if shards == 1 else {"max_shard_size": size}))
    return folder


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("case", SOURCES)
def test_every_kind_of_llama(tmp_path, case):
    overrides, dtype, shards = SOURCES[case]
    source, output = save_llama(tmp_path / "llama", dtype, shards, **overrides), tmp_path / "out"
    before = {file.name: sha256(file) for file in source.iterdir()}
    report = convert(source, output, **BOTH, verify="L0")
    base_shards = sorted(source.glob("*.safetensors"))
    assert (len(base_shards) >= 3) if shards == 3 else (len(base_shards) == 1)

    total = len(base_shards) + 1
    for number, shard in enumerate(base_shards, 1):
        assert sha256(shard) == sha256(output / f"model-{number:05d}-of-{total:05d}.safetensors")
    assert before == {file.name: sha256(file) for file in source.iterdir()}

    ids = tokens(length=40)
    for run_dtype in {torch.float32, dtype}:
        llama = LlamaForCausalLM.from_pretrained(source, dtype=run_dtype).eval()
        converted, info = Transformer2ForCausalLM.from_pretrained(output, dtype=run_dtype, output_loading_info=True)
        assert not any(info.values())
        with torch.no_grad():
            assert torch.equal(llama(ids).logits, converted.eval()(ids).logits)
    assert converted.config.tie_word_embeddings == bool(overrides.get("tie_word_embeddings"))
    assert converted.config.rope_parameters == llama.config.rope_parameters

    result = verify(source, output, "L3", fresh_process=False)
    assert result["passed"], result["failures"]
    probes = {"short", "long", "left_padded", "right_padded", "beyond", "packed", "cached", "loading"}
    names = {check["name"] for check in result["checks"] if check["level"] == "L2"}
    assert names == {f"{str(d).removeprefix('torch.')} {probe}" for d in {torch.float32, dtype} for probe in probes}
    old = dict(llama.named_parameters())
    assert report["new_parameters"] == sum(p.numel() for n, p in converted.named_parameters() if n not in old)


@pytest.mark.parametrize(
    ("residual", "local_mixer"),
    [
        ("standard", "none"),
        ({"type": "ddl", "value_channels": 4}, "none"),
        (
            {"type": "ddl", "value_channels": 2, "compress": "tokens", "expand": True},
            {"type": "short_swa", "layers": [1]},
        ),
        ({"type": "ddl", "gate_hidden_size": 8}, "none"),
        ("short_swa", "none"),
        ({"type": "short_swa", "share_weights": False, "window": None, "num_heads": 2}, "none"),
        ("short_swa", {"type": "short_swa", "mask": "chunk", "window": 4, "rope": False}),
        *((RESIDUALS[name], "none") for name in IDENTITY_RESIDUALS if not name.startswith(("standard", "ddl"))),
        *(("standard", LOCAL_MIXERS[name]) for name in IDENTITY_MIXERS if name != "none"),
        ("standard", {"type": "short_swa", "site": "attn"}),
        ("standard", {"type": "short_swa", "site": "mlp"}),
        ("standard", {"type": "short_conv", "site": "qkv"}),
        ("standard", {"type": "short_conv", "site": "embedding", "gated": True}),
        ("dca", "short_swa"),
        ("mudd", "short_swa"),
        ("attn_res", "short_swa"),
    ],
)
def test_every_variant_starts_as_its_source(tmp_path, residual, local_mixer):
    source, output = save_llama(tmp_path / "llama", torch.bfloat16, tie_word_embeddings=True), tmp_path / "out"
    convert(source, output, residual=residual, local_mixer=local_mixer, verify="L0")
    result = verify(source, output, "L3", fresh_process=False)
    assert result["passed"], result["failures"]
    for axis in ("residual", "local_mixer"):
        choice = json.loads((output / "config.json").read_text())[axis]
        assert choice.get("form", "identity") == "identity"
        assert ("form" in choice) == (choice["type"] not in ("standard", "none"))


@pytest.mark.parametrize("residual", [name for name in RESIDUAL_MENU if name != "standard"])
def test_one_layer_is_enough(tmp_path, residual):
    source, output = save_llama(tmp_path / "llama", num_hidden_layers=1), tmp_path / "out"
    convert(source, output, residual=residual, local_mixer="canon" if residual not in ("dca", "mudd") else "none")
    assert verify(source, output, "L3", fresh_process=False)["passed"]


def test_index_and_types(tmp_path):
    source, output = save_llama(tmp_path / "llama", torch.bfloat16, 3), tmp_path / "out"
    report = convert(source, output, **BOTH, verify="L0")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    tensors = {}
    for shard in output.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert index["weight_map"][name] == shard.name
            tensors[name] = tensor
    assert set(tensors) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())
    new = load_file(sorted(output.glob("*.safetensors"))[-1])
    assert len(new) == report["new_tensors"] == 36 + 15
    for name, tensor in new.items():
        assert tensor.dtype == (torch.float32 if "_residual.rewrite." in name else torch.bfloat16), name
    with safe_open(sorted(output.glob("*.safetensors"))[-1], "pt") as shard:
        assert shard.metadata() == {"format": "pt"}


def test_new_parameters_are_those_of_the_model_itself(tmp_path):
    source = save_llama(tmp_path / "llama")
    state = torch.get_rng_state()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        convert(source, tmp_path / name, **BOTH, verify="L0", seed=seed)
    assert torch.equal(state, torch.get_rng_state())
    shard = "model-00002-of-00002.safetensors"
    a, b, c = (load_file(tmp_path / name / shard) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    query = "model.layers.0.local_mixer.swa.query.weight"
    assert not torch.equal(a[query], c[query])
    assert a[query].std().item() == pytest.approx(0.02, rel=0.1)
    assert a["model.layers.2.attn_residual.rewrite.carry"] == 1
    for zero in ("attn_residual.rewrite.erase", "mlp_residual.rewrite.gate.weight", "local_mixer.swa.output.weight"):
        assert not a[f"model.layers.1.{zero}"].any()
    assert torch.equal(a["model.layers.1.local_layernorm.weight"], torch.ones(32))


def test_config_says_everything(tmp_path):
    source, output = save_llama(tmp_path / "llama", torch.bfloat16, eos_token_id=[2, 7]), tmp_path / "out"
    convert(source, output, residual={"type": "ddl", "value_channels": 4}, verify="L0")
    config, old = (json.loads((folder / "config.json").read_text()) for folder in (output, source))
    for name, value in old.items():
        if name not in ("architectures", "model_type"):
            assert config[name] == value, name
    assert config["model_type"] == "transformer2"
    assert config["architectures"] == ["Transformer2ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert (
        config["residual"]
        == Transformer2Config(residual={"type": "ddl", "value_channels": 4, "form": "identity"}).residual
    )
    assert config["auto_map"]["AutoConfig"] == "configuration_transformer2.Transformer2Config"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_transformer2.Transformer2ForCausalLM"
    assert {"AutoModel", "AutoModelForSequenceClassification"} <= set(config["auto_map"])
    for reference in config["auto_map"].values():
        file, _, name = reference.partition(".")
        assert re.search(rf"^class {name}\b", (output / f"{file}.py").read_text(), re.MULTILINE)


def test_old_spelling_of_rope_is_understood(tmp_path):
    source, output = tmp_path / "llama", tmp_path / "out"
    save_llama(source, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    file = source / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config.update(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}, torch_dtype=config.pop("dtype"))
    file.write_text(json.dumps(config))
    convert(source, output, residual="ddl", verify="L0")
    written = json.loads((output / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    assert written["dtype"] == "float32"
    assert "rope_scaling" not in written
    assert verify(source, output, "L2", fresh_process=False)["passed"]


def test_side_files_are_carried_byte_by_byte(tmp_path):
    source, output = save_llama(tmp_path / "llama"), tmp_path / "out"
    carried = {
        "tokenizer.json": b'{"a": "\xc3\xa9"}\r\n',
        "tokenizer.model": bytes(range(256)),
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool.jinja": b"{{ tools }}",
        "special_tokens_map.json": b"{}",
        "LICENSE": b"terms",
    }
    dropped = [
        *(
            "pytorch_model.bin",
            "optimizer.pt",
            "training_args.bin",
            "model.gguf",
            "trainer_state.json",
            ".gitattributes",
        ),
        *("consolidated.safetensors", "modeling_llama.py", "original/params.json", "checkpoint-10/config.json"),
    ]
    for name, content in {**carried, **dict.fromkeys(dropped, b"x"), "README.md": b"# Base"}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    convert(source, output, residual="ddl", verify="L1")
    for name, content in carried.items():
        assert (output / name).read_bytes() == content
    assert (output / "BASE_README.md").read_bytes() == b"# Base"
    assert (output / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert (output / "README.md").read_text().startswith("---\nlibrary_name: transformers\n")
    assert not [name for name in dropped if (output / name).exists()]
    (output / "tokenizer.json").write_bytes(b"{}")
    failures = verify(source, output, "L1")["failures"]
    assert any(failure.startswith("L1 carried files: tokenizer.json") for failure in failures)


def test_provenance_without_a_trace_of_this_machine(tmp_path):
    source, output = save_llama(tmp_path / "llama"), tmp_path / "out"
    convert(source, output, **BOTH, verify="L2")
    for file in output.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes(), file.name
    provenance = json.loads((output / "transformer2_conversion.json").read_text())
    assert provenance["source"] == {"name": "llama", "commit": None, "gguf": None}
    assert provenance["options"]["seed"] == 0
    written = {file.name for file in output.iterdir()} - {
        "transformer2_conversion.json",
        "verification.json",
        "README.md",
    }
    assert set(provenance["files"]) == written
    for name, entry in provenance["files"].items():
        assert entry["sha256"] == sha256(output / name)
        assert entry["size"] == (output / name).stat().st_size
    assert provenance["files"]["model-00001-of-00002.safetensors"]["from"] == "model.safetensors"
    result = json.loads((output / "verification.json").read_text())
    assert result["passed"]
    assert result["checks"][-1]["name"] == "without the package"


def test_loads_through_the_auto_class_and_saves_again(tmp_path):
    source, output = save_llama(tmp_path / "llama"), tmp_path / "out"
    convert(source, output, **BOTH, verify="L0")
    model = AutoModelForCausalLM.from_pretrained(output)
    assert type(model) is Transformer2ForCausalLM
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_another_form_is_refused_where_equality_is_asked_for(tmp_path):
    source, output = save_llama(tmp_path / "llama"), tmp_path / "out"
    paper = {"type": "ddl", "form": "paper"}
    with pytest.raises(UserError, match=r"residual 'ddl' in its 'paper' form .* verify='L1' .--verify L1"):
        convert(source, output, residual=paper)
    assert not output.exists()
    assert convert(source, output, residual=paper, verify="L1")["residual"]["form"] == "paper"
    failures = verify(source, output, "L2", fresh_process=False)["failures"]
    assert any(failure.startswith("L2 float32 short: logits differ") for failure in failures)


def test_inspect(tmp_path):
    source, output = save_llama(tmp_path / "llama"), tmp_path / "out"
    convert(source, output, **BOTH, verify="L0")
    report = inspect_checkpoint(output)
    assert report["residual"]["type"] == "ddl"
    assert report["new_parameters"] == sum(kind["parameters"] for kind in report["kinds"])
    assert report["new_parameters"] == report["variant_parameters"] > 0
    kinds = {kind["name"]: kind for kind in report["kinds"]}
    assert kinds["model.layers.*.mlp_residual.rewrite.value.weight"]["shape"] == [1, 32]
    assert kinds["model.layers.*.mlp_residual.rewrite.value.weight"]["tensors"] == 3
    assert report["scalars"]["attn carry"]["by_layer"] == [1.0, 1.0, 1.0]
    assert report["scalars"]["mlp erase"] == {"min": 0.0, "mean": 0.0, "max": 0.0, "by_layer": [0.0, 0.0, 0.0]}
    assert report["provenance"]["source"]["name"] == "llama"
    assert report["verification"] == {"level": "L0", "passed": True, "failures": []}
    with pytest.raises(UserError, match="no Transformer2 checkpoint"):
        inspect_checkpoint(source)
