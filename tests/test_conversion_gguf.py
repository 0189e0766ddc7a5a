"""GGUF sources: a tiny file, written here in float32, so that the dequantised weights are known."""

import json
import sys

import pytest
import torch
from helpers import SIZE, tiny_llama
from safetensors.torch import load_file
from transformers import AutoTokenizer

from transformer2.conversion import convert
from transformer2.errors import MachineError, UserError

gguf = pytest.importorskip("gguf")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
}
TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def halves_interleaved(weight, heads):
    """llama.cpp's order of rotary pairs: [heads * d, D], first and second halves of each head in turns."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(scope="module")
def llama():
    return tiny_llama(tie_word_embeddings=False)


@pytest.fixture
def gguf_file(tmp_path, llama):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    heads, kv_heads = SIZE["num_attention_heads"], SIZE["num_key_value_heads"]
    writer.add_context_length(SIZE["max_position_embeddings"])
    writer.add_embedding_length(SIZE["hidden_size"])
    writer.add_block_count(SIZE["num_hidden_layers"])
    writer.add_feed_forward_length(SIZE["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(20000.0)
    writer.add_rope_dimension_count(SIZE["hidden_size"] // heads)
    writer.add_vocab_size(SIZE["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    letters = ["<pad>", "<s>", "</s>", "ab", "cd", *(chr(code) for code in range(33, 127))]
    writer.add_token_list([*letters, *(f"x{i}" for i in range(SIZE["vocab_size"] - len(letters)))])
    writer.add_token_types([3, 3, 3] + [1] * (SIZE["vocab_size"] - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in llama.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            tensor = halves_interleaved(tensor, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "tiny.gguf"


def test_tiny_file(gguf_file, tmp_path, llama):
    report = convert(gguf_file, tmp_path / "out", residual="ddl", verify="L1")
    assert report["dequantised"] == "out-dequantised"
    assert report["verification"]["passed"]
    folder = tmp_path / "out-dequantised"
    weights = load_file(folder / "model.safetensors")
    for name, tensor in llama.state_dict().items():
        assert torch.equal(weights[name], tensor.bfloat16()), name
    for where in (folder, tmp_path / "out"):
        config = json.loads((where / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
        assert config["rope_parameters"]["rope_theta"] == 20000.0
        assert config["dtype"] == "bfloat16"
        tokenizer = AutoTokenizer.from_pretrained(where)
        assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
        assert tokenizer.chat_template == TEMPLATE
    for file in [*folder.iterdir(), *(tmp_path / "out").iterdir()]:
        assert str(tmp_path).encode() not in file.read_bytes(), file.name

    # The folder is used again, but never mistaken for that of another file.
    convert(gguf_file, tmp_path / "out", residual="short_swa", verify="L0", overwrite=True)
    gguf_file.write_bytes(gguf_file.read_bytes() + b"\0")
    with pytest.raises(UserError, match="is not the dequantised tiny.gguf; move it away"):
        convert(gguf_file, tmp_path / "out", residual="ddl", verify="L0", overwrite=True)


def test_other_files(tmp_path, gguf_file, monkeypatch):
    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="other.gguf says 'bert', and only these can be converted: llama"):
        convert(other, tmp_path / "out", residual="ddl")
    with pytest.raises(UserError, match="Unknown residual type 'dll'"):
        convert(gguf_file, tmp_path / "out", residual="dll")
    other.write_bytes(b"not GGUF at all, but long enough to hold a header")
    with pytest.raises(UserError, match="no readable GGUF file"):
        convert(other, tmp_path / "out", residual="ddl")
    with pytest.raises(UserError, match="--revision"):
        convert(gguf_file, tmp_path / "out", residual="ddl", revision="main")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MachineError, match=r"pip install 'transformer2\[gguf\]'"):
        convert(gguf_file, tmp_path / "out", residual="ddl")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.gguf", "tiny.gguf"]
