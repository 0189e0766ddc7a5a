"""Layer by layer, with one layer of each network in memory, verification finds what it finds with whole networks."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import EXACT_RESIDUALS, IDENTITY_MIXERS, LOCAL_MIXERS, RESIDUALS, tiny_llama
from safetensors.torch import load_file, save_file
from test_conversion_matrix import source as odd_source
from transformers import AutoTokenizer
from typer.testing import CliRunner

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion import computed, convert, verify
from transformer2.conversion.checkpoints import open_checkpoint
from transformer2.conversion.layer_logits import check_logits_by_layer
from transformer2.conversion.layer_stream import LayerStream, Run
from transformer2.conversion.liveness import check_liveness, check_liveness_by_layer
from transformer2.conversion.llama_sources import check_llama
from transformer2.conversion.probes import probe_chunks, probe_inputs, run_probe
from transformer2_cli import app

BASE, NEW = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PROBES = {"short", "long", "left_padded", "right_padded", "beyond", "packed", "cached"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama(tie_word_embeddings=True).save_pretrained(folder / "llama")
    mixer = {"type": "short_swa", "window": 8}
    convert(folder / "llama", folder / "out", residual="ddl", local_mixer=mixer, verify="L0")
    return folder


@pytest.fixture
def output(pair, tmp_path):
    return shutil.copytree(pair / "out", tmp_path / "out")


def edit(file, name, change):
    tensors = load_file(file)
    tensors[name] = change(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def both_networks(pair, folder, dtype=torch.float32):
    """The same model twice: cut into layers, and whole."""
    config = Transformer2Config.from_pretrained(folder)
    streamed = LayerStream(Transformer2ForCausalLM, config, open_checkpoint(folder).tensors, dtype)
    return streamed, Transformer2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("residual", ["ddl_tc_ec", "depth_swa", "mudd", "hyper", "elc_bert"])
@torch.no_grad()
def test_a_streamed_network_is_the_network(tmp_path, residual):
    """Not at an identity start: random weights, of which none is zero, and a mixer with a cache."""
    torch.manual_seed(0)
    config = Transformer2Config(
        **json.loads(json.dumps(tiny_llama().config.to_dict())) | {"model_type": "transformer2"},
        residual=RESIDUALS[residual],
        local_mixer=LOCAL_MIXERS["swa"],
    )
    model = Transformer2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    streamed = LayerStream(Transformer2ForCausalLM, config, open_checkpoint(tmp_path).tensors, torch.float32)
    probes = probe_inputs(config)
    runs = {name: Run(probe_chunks(name, inputs), name == "cached") for name, inputs in probes.items()}
    streamed.enter(list(runs.values()))
    for index in range(len(streamed)):
        streamed.step(index, list(runs.values()))
    assert all(p.device.type == "meta" for layer in streamed.layers for p in layer.parameters())
    for name, run in runs.items():
        hidden, mask = streamed.leave(run), probes[name].get("attention_mask")
        hidden = hidden.flatten(0, 1) if mask is None else hidden[mask.bool()]
        with streamed.head() as head:
            torch.testing.assert_close(head(hidden), run_probe(model, name, probes[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("residual", "mixer"),
    [(r, "none") for r in EXACT_RESIDUALS] + [("ddl_identity_tc_ec", m) for m in IDENTITY_MIXERS],
)
def test_every_variant_is_proved(pair, tmp_path, residual, mixer):
    output, choice = tmp_path / "out", {"residual": RESIDUALS[residual], "local_mixer": LOCAL_MIXERS[mixer]}
    convert(pair / "llama", output, **choice, verify="L0")
    result = verify(pair / "llama", output, "L2", stream_layers=True)
    assert result["passed"], result["failures"]
    assert {check["name"] for check in result["checks"] if check["level"] == "L2"} == {f"float32 {p}" for p in PROBES}
    assert result["notes"] == [
        "The networks were compared layer by layer, never whole in memory, so the process without the package was "
        "left out."
    ]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "smollm3"])
def test_families_and_shards(tmp_path, family):
    row = {"family": family, "kv_heads": 2, "head_dim": 8, "biases": False, "vocabulary": 101, "tied": "untied"}
    odd_source(tmp_path / "source", {**row, "rope": "yarn", "dtype": "bfloat16", "shards": 3})
    convert(tmp_path / "source", tmp_path / "out", residual="ddl", verify="L0")
    result = verify(tmp_path / "source", tmp_path / "out", "L4", stream_layers=True)
    assert result["passed"], result["failures"]
    assert len(result["checks"]) == 5 + 2 + 2 * len(PROBES) + 2 + 1


def test_command(pair, output):
    arguments = ["verify", str(pair / "llama"), str(output), "--level", "L2", "--stream-layers"]
    run = CliRunner().invoke(app, [*arguments, "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["passed"]
    edit(output / BASE, "model.layers.1.mlp.up_proj.weight", lambda w: w + 1e-3)
    run = subprocess.run([sys.executable, "-m", "transformer2", *arguments], capture_output=True, text=True)
    assert run.returncode == 1
    assert "Layer" not in run.stderr.split("Verification")[0]  # a line per layer is too much for a log
    assert "after layer 1, whose tensor" in " ".join(run.stderr.replace("│", " ").split())


def test_up_to_rounding(pair, tmp_path):
    convert(pair / "llama", tmp_path / "out", residual={"type": "mhc"}, verify="L0")
    result = verify(pair / "llama", tmp_path / "out", "L2", stream_layers=True)
    assert result["passed"], result["failures"]
    details = [check["detail"] for check in result["checks"] if check["level"] == "L2"]
    assert all(detail.startswith("equal up to rounding") for detail in details)


def test_the_first_differing_tensor_is_named(pair, output):
    edit(output / BASE, "model.layers.2.mlp.up_proj.weight", lambda w: w + 1e-3)
    edit(output / BASE, "model.layers.1.self_attn.k_proj.weight", lambda w: w + 1e-3)
    failures = [f for f in verify(pair / "llama", output, "L2", stream_layers=True)["failures"] if f.startswith("L2")]
    assert len(failures) == 1
    name = "model.layers.1.self_attn.k_proj.weight"
    assert failures[0].endswith(f"after layer 1, whose tensor {name} has other values than in the source")


def test_a_new_parameter_that_changes_the_function_is_located(pair, output):
    edit(output / NEW, "model.layers.1.mlp_residual.rewrite.gate.bias", lambda b: b + 1e-2)
    (failure,) = (f for f in verify(pair / "llama", output, "L2", stream_layers=True)["failures"] if f[:2] == "L2")
    assert "after layer 1, in what follows its MLP: the layer's pretrained tensors are equal, so new" in failure
    edit(output / NEW, "model.layers.1.mlp_residual.rewrite.gate.bias", lambda b: b - 1e-2)
    edit(output / NEW, "model.layers.2.local_mixer.swa.output.weight", lambda w: w + 1e-2)
    (failure,) = (f for f in verify(pair / "llama", output, "L2", stream_layers=True)["failures"] if f[:2] == "L2")
    assert "after layer 2, first in the output of input_layernorm: the layer's pretrained tensors are equal" in failure


def test_embeddings_and_head_are_compared(pair, output, tmp_path):
    edit(output / BASE, "model.embed_tokens.weight", lambda w: w * (1 + 1e-3))
    failures = verify(pair / "llama", output, "L2", stream_layers=True)["failures"]
    assert any(f.endswith("the embeddings, whose tensor model.embed_tokens.weight has other values than in the source")
               for f in failures)  # fmt: skip
    tiny_llama().save_pretrained(tmp_path / "untied")
    convert(tmp_path / "untied", tmp_path / "other", residual="ddl", verify="L0")
    edit(tmp_path / "other" / BASE, "lm_head.weight", lambda w: w * (1 + 1e-3))
    failures = verify(tmp_path / "untied", tmp_path / "other", "L2", stream_layers=True)["failures"]
    assert any("first in the head, whose tensor lm_head.weight has other values" in failure for failure in failures)


def test_gradients_are_those_of_the_whole_network(pair, tmp_path):
    output = tmp_path / "out"
    for residual, mixer in (("ddl_identity_tc_ec", "swa_identity"), ("depth_swa_identity", "none")):
        choice = {"residual": RESIDUALS[residual], "local_mixer": LOCAL_MIXERS[mixer]}
        convert(pair / "llama", output, **choice, verify="L0", overwrite=True)
        checkpoint, config = open_checkpoint(output), Transformer2Config.from_pretrained(output)
        new = [name for name in checkpoint.tensors if name not in open_checkpoint(pair / "llama").tensors]
        whole, streamed = check_liveness(output, new), check_liveness_by_layer(checkpoint, config, new)
        assert streamed.pop("losses") == pytest.approx(whole.pop("losses"), rel=1e-5)
        assert streamed == whole


def test_chosen_by_itself_when_memory_is_short(pair, output, monkeypatch):
    source = check_llama(open_checkpoint(pair / "llama"))
    size = 4 * sum(entry.num_elements for entry in source.checkpoint.tensors.values())
    monkeypatch.setattr(computed, "_free_memory", lambda: 2 * size)
    assert not computed.exceeds_memory(source)
    monkeypatch.setattr(computed, "_free_memory", lambda: size)
    assert computed.exceeds_memory(source)
    said = []
    assert verify(pair / "llama", output, "L2", progress=said.append)["passed"]
    assert "The networks do not fit into memory whole, so they are compared layer by layer" in said


def test_one_layer_at_a_time(tmp_path):
    """The most weights that are in memory together: a layer, what is never dropped, and embeddings."""
    tiny_llama(num_hidden_layers=8).save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "out", residual="ddl", verify="L0")
    source, output = check_llama(open_checkpoint(tmp_path / "llama")), open_checkpoint(tmp_path / "out")
    sizes: list[int] = []
    loaded = LayerStream._fill

    def fill(network, module, prefix):
        loaded(network, module, prefix)
        sizes.append(sum(p.numel() for p in network.model.parameters() if p.device.type == "cpu"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerStream, "_fill", fill)
        check_logits_by_layer(source, output, Transformer2Config.from_pretrained(tmp_path / "out"), torch.float32)
    total = sum(entry.num_elements for entry in source.checkpoint.tensors.values())
    layer = sum(e.num_elements for n, e in output.tensors.items() if n.startswith("model.layers.0."))
    embedding = source.config.vocab_size * source.config.hidden_size
    assert max(sizes) <= max(layer, embedding) + 2 * source.config.hidden_size < total / 5


@pytest.fixture(scope="module")
def with_tokenizer(pair, tmp_path_factory):
    """The pair, whose model has a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tiny_llama(vocab_size=256).save_pretrained(folder / "llama")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "llama")
    assert len(AutoTokenizer.from_pretrained(folder / "llama")("A river")["input_ids"]) == 7
    convert(folder / "llama", folder / "out", residual="ddl", verify="L0")
    return folder


def test_quality(with_tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("A short text of one's own, to be scored. " * 3)
    whole = verify(with_tokenizer / "llama", with_tokenizer / "out", "L4", fresh_process=False, text=text)
    assert whole["passed"], whole["failures"]
    by_layer = verify(with_tokenizer / "llama", with_tokenizer / "out", "L4", stream_layers=True, text=text)
    perplexity, continuations = (check for check in whole["checks"] if check["level"] == "L4")
    (streamed,) = (check for check in by_layer["checks"] if check["level"] == "L4")
    assert continuations["detail"] == "3 of 3 prompts continued with the same tokens"
    figures = perplexity["figures"]
    assert figures["tokens"] == len(text.read_bytes()) - 1
    assert figures["text"] == "text.txt"
    model = tiny_llama(vocab_size=256)
    ids = AutoTokenizer.from_pretrained(with_tokenizer / "llama")(text.read_text(), return_tensors="pt")["input_ids"]
    assert figures["base_nll"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-5)
    assert streamed["figures"]["nll"] == pytest.approx(figures["nll"], rel=1e-6)


def test_quality_finds_a_changed_model(with_tokenizer, tmp_path):
    output = shutil.copytree(with_tokenizer / "out", tmp_path / "out")
    edit(output / NEW, "model.layers.1.mlp_residual.rewrite.gate.bias", lambda b: b + 2.0)
    result = verify(with_tokenizer / "llama", output, "L4", fresh_process=False)
    failures = [failure for failure in result["failures"] if failure.startswith("L4")]
    assert any("nats per token on a sample text" in failure and "in the source" in failure for failure in failures)
    assert any(failure.startswith("L4 continuations: ") for failure in failures)
