"""What the tests of training, evaluation and generation share (no tests): tokenizers, checkpoints, texts, runs."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import tiny_llama, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import transformer2_cli

IDENTITY_DDL = {"type": "ddl", "form": "identity"}
IDENTITY_SHORT_SWA = {"type": "short_swa", "form": "identity", "window": 4}


def word_tokenizer(size: int = 101) -> PreTrainedTokenizerFast:
    """One token per word: "w3" ... "w100"; 0, 1 and 2 are padding, end of text and unknown."""
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words = Tokenizer(models.WordLevel({**special, **{f"w{i}": i for i in range(3, size)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that characters beyond ASCII have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{byte: index + 1 for index, byte in enumerate(alphabet)}}
    bpe = Tokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def words(count: int, seed: int = 0) -> str:
    """`count` random words of the tokenizer."""
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(3, 101, count))


def documents(lengths: list[int]) -> str:
    """Documents of so many words each, with "|" between them."""
    return "|".join(words(length, seed) for seed, length in enumerate(lengths))


def checkpoint(folder: Path, residual: Any = IDENTITY_DDL, local_mixer: Any = "none", **options: Any) -> Path:
    """A tiny Transformer2 (residual=None: a Llama) with a tokenizer, on disk in the type `dtype` (bfloat16)."""
    dtype = options.pop("dtype", torch.bfloat16)
    options = {"eos_token_id": 1, "bos_token_id": None, **options}
    model = (
        tiny_llama(**options) if residual is None else tiny_model(residual, local_mixer, **{"noise": 0.0, **options})
    )
    floats = getattr(model, "_keep_in_fp32_modules_strict", None) or getattr(
        getattr(model, "model", None), "_keep_in_fp32_modules_strict", None
    )
    for name, parameter in model.named_parameters():
        if not any(module in name for module in floats or ()):
            parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def run_settings(model: Path, output: Path, text: Path, **optimisation: Any) -> dict[str, Any]:
    """A small run: rows of 16 tokens, 4 steps of 4 rows, documents separated by "|"."""
    optimisation = {"steps": 4, "rows_per_step": 4, "precision": "fp32", "lr": {"new": 1e-2}, **optimisation}
    data = {"train": str(text), "sequence_length": 16, "separator": "|"}
    return {"model": str(model), "output": str(output), "data": data, "optimisation": optimisation}


def command(monkeypatch, capsys, *arguments: Any) -> tuple[int, str, str]:
    """Run the command line in this process -> exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["transformer2", *map(str, arguments)])
    code = 0
    try:
        transformer2_cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err
