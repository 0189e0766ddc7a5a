"""`transformer2 merge`: base and adapters become one checkpoint that computes what they computed together."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from training_tools import IDENTITY_DDL, checkpoint, command, documents, run_settings
from transformers import AutoModelForCausalLM

from transformer2.errors import UserError
from transformer2.training import merge, train

LORA = {"r": 2, "alpha": 64.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text.txt").write_text(documents([20, 9, 31]))
    model = checkpoint(folder / "base", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, folder / "out", folder / "text.txt", train="lora", lora=LORA)
    settings["optimisation"]["lr"]["lora"] = 1e-2
    train(settings)
    return folder


def logits(model):
    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_the_merged_model_computes_what_base_and_adapters_compute(run, tmp_path):
    report = merge(run / "out" / "adapter", tmp_path / "merged", base=run / "base")
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    live = logits(PeftModel.from_pretrained(base, run / "out" / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    plain = logits(AutoModelForCausalLM.from_pretrained(run / "base"))
    assert (merged - live).abs().max() <= 1e-5 * live.abs().max()
    assert (plain - live).abs().max() > 1e-2 * live.abs().max()  # or nothing would have been shown
    assert report["largest_difference"] <= 1e-5 * report["largest_logit"]
    assert report["adapted"] == 7 * 3  # projections in each of three layers
    expected, found = (load_file(f / "model.safetensors") for f in (run / "out", tmp_path / "merged"))
    assert expected.keys() == found.keys()  # the run has merged them itself
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_the_command_says_what_it_did_and_keeps_what_is_there(run, tmp_path, monkeypatch, capsys):
    arguments = ["merge", run / "out", tmp_path / "merged", "--base", run / "base"]
    code, out, _ = command(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "21 matrices adapted" in out
    code, _, error = command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert "already exists" in error
    code, out, _ = command(monkeypatch, capsys, *arguments, "--overwrite", "--json")
    assert json.loads(out)["base"] == "base"
    code, out, error = command(monkeypatch, capsys, "verify", run / "base", tmp_path / "merged")
    assert "This folder was trained" in out + error


def test_the_base_is_found_by_its_name_where_it_lies(run, tmp_path, monkeypatch):
    monkeypatch.chdir(run)
    assert merge("out", tmp_path / "merged")["base"] == "base"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="was trained on 'base', which is not here: name its folder with --base"):
        merge(run / "out", tmp_path / "again")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("other weights", "was trained on other weights"),
        ("missing", "lacks 1 tensors"),
        ("more", "no place for 1 tensors"),
        ("shape", "does not fit"),
        ("truncated", "is damaged"),
        ("pickle", "has no adapter_model.safetensors"),
        ("nothing", "holds no adapter"),
    ],
)
def test_an_adapter_that_does_not_belong_is_refused(run, tmp_path, damage, sentence):
    adapter = tmp_path / "adapter"
    PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(run / "base"), run / "out" / "adapter"
    ).save_pretrained(adapter)
    file, base = adapter / "adapter_model.safetensors", run / "base"
    weights = load_file(file)
    name = next(iter(weights))
    if damage == "other weights":
        base = checkpoint(tmp_path / "other", IDENTITY_DDL, dtype=torch.float32, seed=5)
        adapter = run / "out" / "adapter"
    elif damage == "missing":
        save_file({key: value for key, value in weights.items() if key != name}, file)
    elif damage == "more":
        save_file({**weights, name.replace("layers.0", "layers.7"): weights[name].clone()}, file)
    elif damage == "shape":
        save_file({**weights, name: torch.zeros(3, 5)}, file)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "pickle":
        file.rename(adapter / "adapter_model.bin")
    else:
        (adapter / "adapter_config.json").unlink()
    with pytest.raises(UserError, match=sentence):
        merge(adapter, tmp_path / "merged", base=base)
    assert not (tmp_path / "merged").exists()


def test_adapters_that_peft_alone_made_are_merged_as_well(run, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    peft_model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    peft_model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", base=run / "base")
    live = logits(peft_model.eval())
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (merged - live).abs().max() <= 1e-5 * live.abs().max()
