"""The ways of base weights into the output: links, clones, copies, and rewriting in another type or other files."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from helpers import tiny_llama, tokens
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from transformer2 import Transformer2ForCausalLM
from transformer2.conversion import convert, files, strip, verify
from transformer2.conversion.checkpoints import INDEX_NAME, PROVENANCE, open_checkpoint
from transformer2.conversion.rewriting import parse_size
from transformer2.errors import UserError

BASE = "model-00001-of-00002.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def stored(folder):
    """Every tensor of a checkpoint, by the library's reader."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("old", "new"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
def test_cast(tmp_path, old, new, shards):
    size = {"max_shard_size": "40KB"} if shards == 3 else {}
    tiny_llama(dtype=DTYPES[old]).save_pretrained(tmp_path / "llama", **size)
    report = convert(tmp_path / "llama", tmp_path / "out", residual="ddl", dtype=new, verify="L0")
    assert report["materialized"] == "rewrite"
    assert "cast to" in report["warnings"][-1]
    base, written = stored(tmp_path / "llama"), stored(tmp_path / "out")
    made, given = (len(list((tmp_path / folder).glob("*.safetensors"))) for folder in ("out", "llama"))
    assert made == given + 1
    for name, tensor in base.items():
        assert written[name].dtype == DTYPES[new]
        assert torch.equal(written[name], tensor.to(DTYPES[new])), name
    model = Transformer2ForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert model.dtype == DTYPES[new]
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=DTYPES[new]).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, llama(tokens()).logits)
    for stream_layers in (False, True):
        options = {"fresh_process": False, "stream_layers": stream_layers}
        assert verify(tmp_path / "llama", tmp_path / "out", "L2", **options)["passed"]


def test_damage_to_a_cast_tensor_is_found(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "out", residual="ddl", dtype="bfloat16", verify="L0")
    tensors = load_file(tmp_path / "out" / BASE)
    tensors["model.norm.weight"][0] *= 1.01
    save_file(tensors, tmp_path / "out" / BASE, metadata={"format": "pt"})
    result = verify(tmp_path / "llama", tmp_path / "out", "L1")
    assert "L1 tensor bytes: model.norm.weight has other bytes than in the source" in result["failures"]


def test_numbers_that_do_not_fit(tmp_path):
    llama = tiny_llama()
    llama.model.norm.weight.data[0] = 1e6
    llama.save_pretrained(tmp_path / "llama")
    with pytest.raises(UserError, match=r"holds 1e\+06, which is too large for float16; choose another dtype"):
        convert(tmp_path / "llama", tmp_path / "out", residual="ddl", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shards", [1, 3])
def test_other_files(tmp_path, shards):
    size = {"max_shard_size": "40KB"} if shards == 3 else {}
    tiny_llama().save_pretrained(tmp_path / "llama", **size)
    report = convert(tmp_path / "llama", tmp_path / "out", residual="ddl", max_shard_size="20kB", verify="L1")
    assert report["materialized"] == "rewrite"
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    names = set(index["weight_map"].values())
    assert names == {file.name for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(names) >= 7
    for file in (tmp_path / "out").glob("*.safetensors"):
        held = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in held)
        assert len(held) == 1 or sum(t.numel() * t.element_size() for t in held.values()) <= 20_000
    base, written = stored(tmp_path / "llama"), stored(tmp_path / "out")
    assert all(torch.equal(written[name], tensor) for name, tensor in base.items())
    strip(tmp_path / "out", tmp_path / "back")  # and the old files come back
    for file in (tmp_path / "llama").iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes(), file.name


def test_strip_of_a_cast_model_is_an_export(tmp_path):
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "out", residual="ddl", dtype="bfloat16", verify="L0")
    report = strip(tmp_path / "out", tmp_path / "back")
    assert not report["identical"]
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "back", dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info.values())
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens()).logits, expected.eval()(tokens()).logits)


def test_same_type_is_no_rewrite(llama_folder, tmp_path):
    report = convert(llama_folder, tmp_path / "out", residual="ddl", dtype="float32", verify="L1")
    assert report["materialized"] in ("copy", "reflink")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "Unknown dtype 'int8'; choose one of: keep, float32, float16, bfloat16"),
        ({"max_shard_size": "many"}, "Cannot read the shard size 'many': write it as 5GB"),
        ({"max_shard_size": "0"}, "Cannot read the shard size '0'"),
        ({"dtype": "float16", "materialize": "link"}, "materialize='link' shares the source's files, which dtype"),
        ({"max_shard_size": 10, "materialize": "reflink"}, "leave either out"),
    ],
)
def test_refusals(llama_folder, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        convert(llama_folder, tmp_path / "out", residual="ddl", **options)
    assert not (tmp_path / "out").exists()


def test_sizes():
    assert parse_size("5GB") == parse_size(5 * 10**9) == parse_size(" 5 g") == 5 * 10**9
    assert parse_size("1.5kB") == 1500
    assert parse_size(None) is None


def test_a_link_is_not_read_before_the_bytes_are_asked_for(llama_folder, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(files, "file_sha256", lambda file: read.append(file) or "0" * 64)
    report = convert(llama_folder, tmp_path / "out", residual="ddl", verify="L0", materialize="link")
    assert report["materialized"] == "link"
    assert read == []
    recorded = json.loads((tmp_path / "out" / PROVENANCE).read_text())["files"]
    assert recorded[BASE]["sha256"] is None
    assert verify(llama_folder, tmp_path / "out", "L1")["passed"]
    recorded = json.loads((tmp_path / "out" / PROVENANCE).read_text())["files"]
    assert recorded[BASE]["sha256"] == hashlib.sha256((llama_folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_linked_source_keeps_its_permissions_where_nothing_was_made(llama_folder, tmp_path, monkeypatch):
    from transformer2.conversion import retrofit

    mode = (llama_folder / "model.safetensors").stat().st_mode
    monkeypatch.setattr(retrofit, "run_checks", lambda *a, **k: {"passed": False, "failures": ["L0 index: bad"]})
    with pytest.raises(UserError, match="Verification failed"):
        convert(llama_folder, tmp_path / "out", residual="ddl", verify="L0", materialize="link")
    assert (llama_folder / "model.safetensors").stat().st_mode == mode


MEMORY = """
import json, sys
import torch
from transformers import LlamaForCausalLM
from transformer2.conversion import convert

def peak():  # getrusage would start from the peak of the process that started this one
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

floor = peak()
convert(sys.argv[1], sys.argv[2], residual="ddl", **json.loads(sys.argv[3]))
print(json.dumps((peak() - floor) / 1024))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """250 MB, most of it one tensor: whatever holds a tensor, or a shard, shows."""
    folder = tmp_path_factory.mktemp("large") / "llama"
    tiny_llama(vocab_size=1_000_000, hidden_size=64, tie_word_embeddings=True).save_pretrained(folder)
    assert sum(entry.end - entry.start for entry in open_checkpoint(folder).tensors.values()) > 250e6
    return folder


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"verify": "L1", "materialize": "copy"}, marks=pytest.mark.slow),
        pytest.param({"verify": "L1", "materialize": "link"}, marks=pytest.mark.slow),
        {"verify": "L1", "dtype": "bfloat16", "max_shard_size": "1MB"},
    ],
)
def test_memory_does_not_grow_with_the_base_model(large, tmp_path, options):
    """At most 64 MiB beyond the new parameters, which are a few kB here, and what imports take (MiB)."""
    command = [sys.executable, "-c", MEMORY, str(large), str(tmp_path / "out"), json.dumps(options)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    used = json.loads(run.stdout.splitlines()[-1])
    assert 0 < used < 64


@pytest.mark.parametrize("damaged", [False, True])
def test_a_source_in_the_cache_of_the_hub_is_what_the_hub_has(llama_folder, tmp_path, damaged):
    """Its shards are links to files that are named by the hash that the Hub lists for them."""
    weights = llama_folder / "model.safetensors"
    blob = tmp_path / "blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    blob.parent.mkdir()
    weights.rename(blob)
    weights.symlink_to(blob)
    if damaged:
        content = bytearray(blob.read_bytes())
        content[-1] ^= 1
        blob.write_bytes(content)
    convert(llama_folder, tmp_path / "out", residual="ddl", verify="L0")
    failures = verify(llama_folder, tmp_path / "out", "L1")["failures"]
    fault = "L1 tensor bytes: the source's model.safetensors is not what the Hub has: download it again"
    assert failures == ([fault] if damaged else [])
