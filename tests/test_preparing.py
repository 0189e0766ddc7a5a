"""`transformer2 doctor`: what it says of a run, and that it finds what the run would stumble over."""

import json

import pytest
import torch
from helpers import SIZE, tiny_model
from torch.autograd.graph import saved_tensors_hooks
from training_tools import IDENTITY_DDL, checkpoint, command, documents, run_settings, word_tokenizer
from transformers import LlamaForCausalLM

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.training import doctor, memory, train
from transformer2.training.isolation import check_isolation
from transformer2.training.packing import PackedText
from transformer2.training.settings import OptimisationSettings, load_settings


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31, 6, 5, 14, 11, 23]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32)
    settings = run_settings(model, tmp_path / "out", tmp_path / "text.txt")
    settings["data"]["eval_tokens"] = 8
    return settings


def test_it_tells_what_the_run_then_does(settings, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    found = doctor(load_settings(settings))
    assert sorted(tmp_path.rglob("*")) == before
    assert (found["problems"], found["warnings"], found["isolation"]) == ([], [], "kept")
    (arm,) = found["arms"]
    (stage,) = arm["stages"]
    report = train(settings)
    assert stage["trained"] == report["parameters"]["new"]["trained"]
    assert stage["frozen"] == report["parameters"]["pretrained"]["frozen"]
    assert stage["steps"] == len(report["steps"])
    assert found["precision"] == report["precision"]
    assert sum(group["count"] for group in stage["groups"]) == stage["trained"]
    layers = SIZE["num_hidden_layers"]
    assert any(
        group["parameters"].get("model.layers.*.attn_residual.rewrite.erase") == layers for group in stage["groups"]
    )


def test_every_stage_and_every_arm_has_its_own_groups(settings):
    settings |= {"control": True, "nulls": ["write_only"]}
    settings["stages"] = [
        {"name": "new", "steps": 2, "train": "new"},
        {"name": "joint", "steps": 3, "train": "lora", "lora": {"r": 2, "targets": ["q_proj"]}},
    ]
    found = doctor(load_settings(settings))
    assert found["problems"] == []
    control, ddl, null = found["arms"]
    assert [arm["name"] for arm in found["arms"]] == ["control", "ddl", "ddl, write_only"]
    new, joint = ddl["stages"]
    adapters = 2 * 2 * SIZE["hidden_size"] * SIZE["num_hidden_layers"]  # A and B of rank 2, of square matrices
    assert [stage["train"] for stage in control["stages"]] == ["lora", "lora"]
    assert [stage["trained"] for stage in control["stages"]] == [adapters, adapters]
    assert joint["trained"] - new["trained"] == adapters
    erases = 2 * SIZE["num_hidden_layers"]  # one number per sublayer, which write_only holds
    assert new["trained"] - null["stages"][0]["trained"] == erases


def test_a_preset_is_described_without_being_made(tmp_path, settings):
    word_tokenizer().save_pretrained(tmp_path / "words")
    settings |= {"model": {"preset": "tiny", "tokenizer": str(tmp_path / "words"), "num_hidden_layers": 2}}
    settings |= {"variants": ["mudd"], "control": True}
    settings["optimisation"]["train"] = "all"
    found = doctor(load_settings(settings))
    assert found["problems"] == []
    config = Transformer2Config(
        vocab_size=len(word_tokenizer()),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    plain = sum(p.numel() for p in Transformer2ForCausalLM(config).parameters())
    assert found["arms"][0]["stages"][0]["trained"] == plain
    assert found["arms"][1]["stages"][0]["trained"] > plain


@pytest.mark.parametrize(
    ("override", "kind", "sentence"),
    [
        ("data.train=gone.txt", "problems", "No such file"),
        ("model=gone", "problems", "There is no folder gone"),
        ("output={tmp}/model", "problems", "already exists"),
        ("optimisation.frozen=[embeddings]", "problems", "no parameter has a name like 'embeddings'"),
        ("optimisation.groups=[{{match: nothing, lr: 1}}]", "problems", "matches no trained parameter"),
        ("nulls=[no_such]", "problems", "There is no null 'no_such'"),
        ("optimisation.lr.new=0.5", "warnings", "moves every parameter by about 0.5"),
        ("data.sequence_length=4096", "warnings", "was made for"),
        ("data.eval_tokens=null", "warnings", "Nothing is held out"),
        ("optimisation.steps=100", "warnings", "The run sees its data"),
        ("optimisation.rows_per_batch=3", "warnings", "no multiple of rows_per_batch (3)"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(settings, tmp_path, monkeypatch, capsys, override, kind, sentence):
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    arguments = ["doctor", tmp_path / "run.yaml", override.format(tmp=tmp_path)]
    code, out, _ = command(monkeypatch, capsys, *arguments, "--json")
    found = json.loads(out)
    assert code == (1 if kind == "problems" else 0)
    assert any(sentence in text for text in found[kind]), found[kind]
    code, out, _ = command(monkeypatch, capsys, *arguments)
    assert f"{kind.removesuffix('s').capitalize()}: " in out
    assert ("Nothing stands in the way." in out) == (kind == "warnings")


def test_settings_that_contradict_themselves_end_it(settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    code, out, error = command(monkeypatch, capsys, "doctor", tmp_path / "run.yaml", "optimisation.stpes=3")
    assert (code, out) == (2, "")
    assert "did you mean 'steps'" in error


def test_a_model_larger_than_the_memory_is_warned_of_and_not_loaded(settings, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    found = doctor(load_settings(settings))
    assert "a step needs about" in found["warnings"][0]
    assert "configs/accelerate" in found["warnings"][0]
    assert found["isolation"] == "not tested here: the model needs more memory than is free"


def estimated(model_config, precision="fp32", **optimisation):
    with torch.device("meta"):
        model = Transformer2ForCausalLM(model_config)
    return memory.estimate(model, OptimisationSettings(**optimisation), 64, precision)


def test_the_estimate_has_the_known_sizes_and_close_to_the_activations_of_a_real_pass():
    config = Transformer2Config(**{**SIZE, "hidden_size": 64, "num_hidden_layers": 3}, residual=IDENTITY_DDL)
    real = Transformer2ForCausalLM(config)
    count = sum(p.numel() for p in real.parameters())
    found = estimated(config, rows_per_batch=2)
    assert (found["weights"], found["gradients"], found["optimizer"]) == (4 * count, 4 * count, 8 * count)
    assert found["logits"] == 3 * 4 * 2 * 64 * config.vocab_size
    assert found["total"] == sum(size for name, size in found.items() if name != "total")
    own, kept = {p.data_ptr() for p in real.parameters()}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        real.model(input_ids=torch.zeros(2, 64, dtype=torch.long), use_cache=False)
    actual = sum(storage.nbytes() for storage in kept.values())
    assert actual <= found["activations"] <= 1.2 * actual  # the real pass does without a mask
    assert estimated(config, rows_per_batch=4)["activations"] > 1.9 * found["activations"]
    assert estimated(config, rows_per_batch=2, gradient_checkpointing=True)["activations"] < 0.5 * found["activations"]
    assert estimated(config, "bf16", rows_per_batch=2)["activations"] < found["activations"]


def test_frozen_weights_have_neither_gradients_nor_moments():
    config = Transformer2Config(**SIZE, residual=IDENTITY_DDL)
    with torch.device("meta"):
        model = Transformer2ForCausalLM(config)
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    found = memory.estimate(model, OptimisationSettings(), 16, "fp32")
    trained = sum(p.numel() for p in model.model.layers[0].parameters())
    assert (found["gradients"], found["optimizer"]) == (4 * trained, 8 * trained)


def test_documents_that_share_a_row_are_found_however_late_the_row_comes():
    """Failure 36: packed documents that see each other. The first rows here hold one document each."""
    torch.manual_seed(0)
    lengths = [16] * 80 + [7, 7]
    rows = PackedText(torch.randint(3, 100, (sum(lengths),)).numpy(), lengths, None).rows(16, "best_fit")
    model = tiny_model(IDENTITY_DDL)
    assert check_isolation(model, rows, torch.device("cpu"))

    class Leaks(torch.nn.Module):
        config = model.config

        def forward(self, position_ids=None, **inputs):
            return model(**inputs)

    with pytest.raises(Exception, match="Packed documents see each other"):
        check_isolation(Leaks(), rows, torch.device("cpu"))
    alone = PackedText(torch.randint(3, 100, (32,)).numpy(), [16, 16], None).rows(16, "best_fit")
    assert not check_isolation(Leaks(), alone, torch.device("cpu"))


def test_a_plain_llama_can_be_examined(settings, tmp_path):
    LlamaForCausalLM.from_pretrained(checkpoint(tmp_path / "llama", None, dtype=torch.float32))
    settings |= {"model": str(tmp_path / "llama")}
    assert "convert it first" in doctor(load_settings(settings))["problems"][0]
    settings["optimisation"]["train"] = "all"
    assert doctor(load_settings(settings))["problems"] == []
