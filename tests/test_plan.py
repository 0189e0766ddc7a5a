"""A plan says beforehand what a conversion then does, from headers alone; for the Hub by range requests."""

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import tiny_llama
from hub_server import COMMIT, HubServer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from transformer2.conversion import convert, plan
from transformer2.conversion.checkpoints import read_range
from transformer2.errors import UserError
from transformer2_cli import app

DDL4 = {"type": "ddl", "value_channels": 4}


def run_cli(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    "choice",
    [
        {"residual": DDL4},
        {"residual": "mudd"},
        {"residual": "short_swa", "local_mixer": {"type": "short_swa", "window": 8}},
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_plan_comes_true(tmp_path, choice, shards):
    llama = tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=True)
    llama.save_pretrained(tmp_path / "llama", **({"max_shard_size": "25KB"} if shards == 3 else {}))
    planned = plan(tmp_path / "llama", **choice)
    report = convert(tmp_path / "llama", tmp_path / "out", **choice, verify="L0", materialize="copy")
    for field in ("residual", "local_mixer", "base_parameters", "new_parameters", "new_bytes", "tie_word_embeddings"):
        assert planned[field] == report[field], field
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    header = 100 * (report["new_tensors"] + 5)
    assert written - header < planned["bytes_to_write"]["copy"] <= written
    assert planned["new_parameters"] == sum(planned["new_parameters_by_layer"]) + planned["new_parameters_elsewhere"]
    assert (planned["family"], planned["layers"], planned["dtype"]) == ("llama", 3, "bfloat16")
    assert planned["shards"] == len(list((tmp_path / "llama").glob("*.safetensors"))) >= shards
    assert (planned["expected_level"], planned["expected_start"]) == ("L4", "bit for bit the source")
    assert planned["possible"]


def test_sizes_by_hand(llama_folder):
    planned = plan(llama_folder, residual="ddl", local_mixer={"type": "short_swa", "window": 8})
    # Two DDL sublayers: rows of width 32 with bias for value and gate, carry, erase; the mixer: q, k, v, o and a norm.
    ddl, mixer = 2 * (33 + 33 + 2), 32 * (32 + 2 * 16 + 32) + 32
    assert planned["new_parameters_by_layer"] == [ddl + mixer] * 3
    # Keys and values of 2 heads of 8 in float32, and the mixer's last 7 keys and values with a flag.
    assert planned["cache"] == {"keys_and_values_per_token": 3 * 2 * 2 * 8 * 4, "extra_per_sequence": 3 * 7 * 33 * 4}
    largest = max(e for e in (3232, 32 * 80 + 32 * 16 + 3 * 32 * 48 + 64))
    assert planned["memory"]["verify_by_layer"] == 4 * (largest + planned["new_parameters"])


def test_no_weight_is_read(llama_folder, monkeypatch):
    from transformer2.conversion import checkpoints

    monkeypatch.setattr(checkpoints, "read_range", lambda *a: pytest.fail("a tensor was read"))
    weights = llama_folder / "model.safetensors"
    length = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    content = weights.read_bytes()
    weights.write_bytes(content[:length] + b"\xff" * (len(content) - length))
    assert plan(llama_folder, residual="ddl")["possible"]
    assert b"".join(read_range(weights, 0, 8)) == content[:8]


def test_warnings(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    llama = tiny_llama(rope_parameters=rope, attention_bias=True, tie_word_embeddings=True, vocab_size=128)
    llama.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 99}}, "added_tokens": [{"id": 100}]})
    )
    assert plan(tmp_path, residual="ddl")["warnings"] == [
        "The vocabulary has 128 rows for 101 tokens of the tokenizer; all are kept.",
        "Rope scaling 'linear' beyond 256 positions is kept, and probed across that line.",
        "The source has biases (k_proj, o_proj, q_proj, v_proj); all are kept.",
    ]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    warnings = plan(tmp_path, residual="ddl")["warnings"]
    assert warnings[0].startswith("config.json said tie_word_embeddings: true, but the head differs")
    assert warnings[-1] == "Tensors are stored in several types (BF16, F32); each keeps its own."


def test_forms_that_start_elsewhere(llama_folder):
    planned = plan(llama_folder, residual={"type": "ddl", "form": "paper"})
    assert planned["expected_level"] == "L1"
    assert "'paper' form" in planned["expected_start"]
    assert plan(llama_folder, residual="mhc")["expected_start"] == "the source up to rounding"


def test_refusals(llama_folder, tmp_path):
    for change, reason in (
        ({"model_type": "gpt2"}, "only these can be converted"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_hidden_layers": 4}, "lacks tensors"),
        ({"head_dim": 16}, "has shape"),
        ({"tie_word_embeddings": False, "vocab_size": 102}, "has shape"),
    ):
        config = json.loads((llama_folder / "config.json").read_text())
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "model.safetensors").write_bytes((llama_folder / "model.safetensors").read_bytes())
        (broken / "config.json").write_text(json.dumps({**config, **change}))
        planned = plan(broken, residual="ddl")
        assert not planned["possible"]
        assert reason in planned["refusal"]
        with pytest.raises(UserError) as error:
            convert(broken, tmp_path / "out", residual="ddl")
        assert str(error.value) == planned["refusal"]
    assert "num_heads" in plan(llama_folder, local_mixer={"type": "short_swa", "num_heads": 0})["refusal"]
    for bad in ("nothing/here/at/all", tmp_path / "missing", tmp_path / "model.gguf"):
        with pytest.raises(UserError):
            plan(bad)
    with pytest.raises(UserError, match="ddl"):
        plan(llama_folder, residual="dld")


def test_a_missing_head_is_noticed_before_anything_is_written(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "the head would be random" in plan(tmp_path, residual="ddl")["refusal"]
    planned = plan(tmp_path, residual="ddl", assume_tied=True)
    assert planned["possible"]
    assert planned["tie_word_embeddings"] is True


def test_command(llama_folder, tmp_path):
    run = run_cli("plan", llama_folder, "--residual", "ddl", "--set", "residual.value_channels=4", "--json")
    assert run.exit_code == 0
    assert json.loads(run.stdout) == plan(llama_folder, residual=DDL4)
    run = run_cli("plan", llama_folder, "--residual", "ddl")
    assert "new parameters  408: 136 per layer\n" in run.stdout
    (llama_folder / "model.safetensors").write_bytes(b"")
    command = [sys.executable, "-m", "transformer2", "plan", str(llama_folder), "--json"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert json.loads(run.stdout)["possible"] is False
    assert run.stderr.startswith("Error: This cannot be converted: ")


ON_THE_HUB = """
import json, sys
from transformer2.conversion import plan
from transformer2.errors import UserError

answers = []
for arguments in json.loads(sys.argv[1]):
    try:
        answers.append(plan(**arguments))
    except UserError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def plans_of(server, tmp_path, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", ON_THE_HUB, json.dumps(arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_hub(tmp_path):
    folder = tmp_path / "llama"
    tiny_llama(vocab_size=4096, num_hidden_layers=8, tie_word_embeddings=True).save_pretrained(
        folder, max_shard_size="400KB"
    )
    tensors = {file.name: load_file(file) for file in folder.glob("*.safetensors")}
    assert len(tensors) >= 2
    (first,) = (name for name, held in tensors.items() if "model.embed_tokens.weight" in held)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors[first]["lm_head.weight"] = tensors[first]["model.embed_tokens.weight"].clone()
    save_file(tensors[first], folder / first, metadata={"format": "pt"})
    index["weight_map"]["lm_head.weight"] = first
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    local = plan(folder, residual="ddl")
    with HubServer(folder) as server:
        name = {"source": "someone/model", "residual": "ddl"}
        found, pinned, no_revision, missing, refused = plans_of(
            server,
            tmp_path,
            name,
            {**name, "revision": COMMIT},
            {**name, "revision": "other"},
            {**name, "source": "someone/else"},
            {**name, "local_mixer": {"type": "short_swa", "num_heads": 0}},
        )
        sent = dict(server.sent)
    assert found["source"] == {"name": "someone/model", "commit": COMMIT}
    assert pinned == found
    judged = "Whether head and embeddings are equal was judged by their first 64 KiB."
    assert found.pop("warnings") == ["lm_head.weight repeats the tied embeddings; its bytes are kept.", judged]
    for field in ("source", "warnings", "base_bytes", "bytes_to_write"):
        found.pop(field, None)
        local.pop(field)
    assert found == local
    assert no_revision == "someone/model has no revision 'other'; see the branches and tags on its page."
    assert missing == "There is no folder and no model on the Hub called 'someone/else'; check the spelling."
    assert "num_heads" in refused["refusal"]
    weights = sum(count for name, count in sent.items() if name.endswith(".safetensors"))
    assert 0 < weights < sum(file.stat().st_size for file in folder.glob("*.safetensors")) * 3
    assert (tmp_path / "hf" / "hub").is_dir()
    assert not [*(tmp_path / "hf").rglob("*.safetensors")]


def test_hub_without_safetensors(tmp_path):
    folder = tmp_path / "llama"
    tiny_llama().save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with HubServer(folder) as server:
        (answer,) = plans_of(server, tmp_path, {"source": "someone/model"})
    assert answer.startswith("someone/model has no safetensors weights; ")
