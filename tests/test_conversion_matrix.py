"""Odd checkpoints convert exactly, every pair of oddities; damaged ones convert exactly or give one clear error."""

import itertools
import json
import random
from typing import Any

import pytest
import torch
from helpers import SIZE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from transformer2.conversion import convert, verify
from transformer2.conversion.checkpoints import INDEX_NAME
from transformer2.conversion.families import FAMILIES, class_named
from transformer2.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ddl": {"residual": "ddl"},
    "attn_res": {"residual": "attn_res"},
    "mudd": {"residual": "mudd"},
    "short_swa": {"local_mixer": {"type": "short_swa", "window": 4}},
}
AXES: dict[str, list[Any]] = {
    "family": [name for name in FAMILIES if name != "transformer2"],
    "variant": list(VARIANTS),
    "tied": ["tied", "tied and stored", "untied", "only the head"],
    "kv_heads": [1, 2, 4],
    "head_dim": [8, 12],
    "biases": [False, True],
    "rope": list(ROPES),
    "vocabulary": [101, 128],
    "dtype": ["float32", "bfloat16", "float16"],
    "shards": [1, 3],
}


def covering_rows(axes: dict[str, list[Any]], candidates: int = 30) -> list[dict[str, Any]]:
    """Rows in which every pair of values of two axes occurs, chosen greedily from random ones."""
    choose = random.Random(0)
    names = list(axes)
    pairs = {
        ((one, a), (two, b)) for one, two in itertools.combinations(names, 2) for a in axes[one] for b in axes[two]
    }
    rows = []

    def covered(row: dict[str, Any]) -> set:
        return set(itertools.combinations(row.items(), 2))

    while pairs:
        (one, two) = min(pairs, key=str)
        drawn = [
            {**{name: choose.choice(values) for name, values in axes.items()}, **dict([one, two])}
            for _ in range(candidates)
        ]
        best = max(drawn, key=lambda row: len(covered(row) & pairs))
        rows.append(best)
        pairs -= covered(best)
    return rows


ROWS = covering_rows(AXES)


def source(folder, row: dict[str, Any]) -> Any:
    """A random model with these peculiarities, saved; returns it."""
    torch.manual_seed(0)
    family = FAMILIES[row["family"]]
    tied = row["tied"] != "untied"
    fields = {**SIZE, "num_key_value_heads": row["kv_heads"], "head_dim": row["head_dim"]}
    fields |= {"vocab_size": row["vocabulary"], "pad_token_id": row["vocabulary"] - 1, "tie_word_embeddings": tied}
    fields |= {"attention_bias": row["biases"]} if row["family"] in ("llama", "qwen3", "smollm3") else {}
    fields |= {"mlp_bias": row["biases"]} if row["family"] in ("llama", "smollm3") else {}
    fields |= {"bos_token_id": 1, "eos_token_id": [2, 3] if row["biases"] else 2}
    rope = {"rope_theta": 10000.0, **ROPES[row["rope"]]}
    model = class_named(family.model)(class_named(family.config)(**fields, rope_parameters=rope)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0).add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, row["dtype"])).save_pretrained(
        folder, max_shard_size="20KB" if row["shards"] > 1 else "1GB"
    )
    shards = sorted(folder.glob("*.safetensors"))
    assert (len(shards) > 1) == (row["shards"] > 1)
    if row["tied"] in ("tied and stored", "only the head"):
        (shard,) = (file for file in shards if EMBEDDING in load_file(file))
        tensors = load_file(shard)
        tensors[HEAD] = tensors[EMBEDDING].clone()
        if row["tied"] == "only the head":
            del tensors[EMBEDDING]
        save_file(tensors, shard, metadata={"format": "pt"})
        if len(shards) > 1:
            index = json.loads((folder / INDEX_NAME).read_text())
            names = {name: file for name, file in index["weight_map"].items() if name not in (EMBEDDING, HEAD)}
            index["weight_map"] = {**names, **dict.fromkeys({EMBEDDING, HEAD} & set(tensors), shard.name)}
            (folder / INDEX_NAME).write_text(json.dumps(index))
    return model


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_odd_checkpoints(row, tmp_path):
    """L0 to L3 hold: structure, bytes, logits bit for bit in float32 and the stored type, gradients."""
    source(tmp_path / "source", row)
    convert(tmp_path / "source", tmp_path / "out", **VARIANTS[row["variant"]], verify="L1")
    result = verify(tmp_path / "source", tmp_path / "out", "L3", fresh_process=False)
    assert result["passed"], result["failures"]


def test_the_matrix_holds_every_pair():
    assert len(ROWS) < 60
    for one, two in itertools.combinations(AXES, 2):
        found = {(row[one], row[two]) for row in ROWS}
        assert found == set(itertools.product(AXES[one], AXES[two]))


DAMAGE = {
    "num_hidden_layers": [2, 3, 4, 0, "three"],
    "num_attention_heads": [2, 4, 3, 0],
    "num_key_value_heads": [1, 2, 4, 3, None],
    "head_dim": [8, 16, 7, None],
    "hidden_size": [32, 64, 30],
    "intermediate_size": [48, 96],
    "vocab_size": [101, 102, -1],
    "hidden_act": ["silu", "gelu", "swish!"],
    "rms_norm_eps": [1e-6, 1e-5, "small"],
    "tie_word_embeddings": [True, False, "maybe"],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "attention_dropout": [0.0, 0.5],
    "max_position_embeddings": [256, 16, 0],
    "rope_theta": [10000.0, 5e5],
    "rope_parameters": [None, *ROPES.values(), {"rope_type": "spiral"}, {"rope_type": "yarn"}, "yarn"],
    "rope_scaling": [None, {"type": "linear", "factor": 2.0}, {"type": "linear"}],
    "sliding_window": [None, 4, 0],
    "layer_types": [None, ["full_attention"] * 3, ["sliding_attention"] * 3, ["linear_attention"] * 3, []],
    "qk_norm": [True],
    "nope_layers": [[1], [9]],
    "use_sliding_window": [True, False],
    "no_rope_layers": [[1, 0, 1], [1]],
    "partial_rotary_factor": [0.5],
    "pretraining_tp": [2],
    "model_type": ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma"],
    "architectures": [None, [], ["LlamaForCausalLM"], ["LlamaModel"]],
    "dtype": ["float32", "bfloat16", "float99", None],
    "quantization_config": [{"quant_method": "gptq"}],
    "residual": ["mudd", {"type": "ddl"}],
    "local_mixer": ["canon", 7],
}
TENSORS = st.sampled_from(["none", "none", "no head", "no norm", "one more", "half", "integers", "wrong shape"])
OPTIONS = st.one_of(
    st.sampled_from([{"residual": "ddl"}, {"residual": "mudd"}, {"local_mixer": "short_swa"}, {}]),
    st.builds(
        lambda kind, key, value: {"residual": {"type": kind, key: value}},
        st.sampled_from(["ddl", "attn_res", "short_swa", "dca", "hyper_connections"]),
        st.sampled_from(["window", "value_channels", "block_size", "num_heads", "num_streams", "compression"]),
        st.sampled_from([0, 1, 2, 3, -1, 1.5, "tc", None, True]),
    ),
)


def damaged(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    norm = "model.layers.1.input_layernorm.weight"
    if kind == "no head":
        tensors.pop(HEAD, None)
    elif kind == "no norm":
        del tensors[norm]
    elif kind == "one more":
        tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    elif kind == "half":
        tensors[norm] = tensors[norm].half()
    elif kind == "integers":
        tensors[norm] = tensors[norm].to(torch.int32)
    elif kind == "wrong shape":
        tensors[norm] = tensors[norm][:-1].clone()
    return tensors


ROW = st.sampled_from([row for row in ROWS if row["shards"] == 1])
EDITS = st.lists(
    st.sampled_from(sorted(DAMAGE)).flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(DAMAGE[key]))),
    max_size=2,
)
REPRODUCIBLY = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=40, **REPRODUCIBLY)
@given(row=ROW, edits=EDITS, tensors=TENSORS, options=OPTIONS)
def test_exact_or_one_clear_error(tmp_path_factory, row, edits, tensors, options):
    exact_or_refused(tmp_path_factory.mktemp("drawn"), row, edits, tensors, options)


@pytest.mark.slow
@settings(max_examples=1000, **REPRODUCIBLY)
@given(row=ROW, edits=EDITS, tensors=TENSORS, options=OPTIONS)
def test_exact_or_one_clear_error_at_length(tmp_path_factory, row, edits, tensors, options):
    exact_or_refused(tmp_path_factory.mktemp("drawn"), row, edits, tensors, options)


def exact_or_refused(folder, row, edits, tensors, options):
    """Whatever config.json and the weights say: the same function as the stock class computes, or one sentence."""
    source(folder / "source", row)
    config = json.loads((folder / "source" / "config.json").read_text())
    (folder / "source" / "config.json").write_text(json.dumps({**config, **dict(edits)}))
    weights = folder / "source" / "model.safetensors"
    save_file(damaged(load_file(weights), tensors), weights, metadata={"format": "pt"})
    before = weights.read_bytes()
    refusal = None
    try:
        convert(folder / "source", folder / "out", **options, verify="L1")
    except UserError as error:
        refusal = str(error)
    if refusal is not None:
        assert "\n" not in refusal
        assert len(refusal) < 600
        assert not (folder / "out").exists()
        assert [file.name for file in folder.iterdir()] == ["source"]
    else:
        ids = torch.tensor([[5, 7, 11, 13, 17, 19, 23, 29, 31, 37]])
        theirs, ours = (
            AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
            for name in ("source", "out")
        )
        with torch.no_grad():
            assert torch.equal(theirs(ids).logits, ours(ids).logits)
    assert weights.read_bytes() == before
