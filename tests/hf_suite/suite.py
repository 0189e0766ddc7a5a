"""The library's common model tests, on stock Llama and on every variant; `run.py` lays `upstream` out for this."""

import unittest
from typing import Any

import torch
import transformers
from helpers import LOCAL_MIXERS, RESIDUALS
from transformers.models.auto import modeling_auto
from upstream import test_modeling_common

import transformer2

SIZE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
TASKS = ("", "CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "QUESTION_ANSWERING", "TOKEN_CLASSIFICATION")
for task, head in zip(TASKS, HEADS, strict=True):  # the tests look names up there
    mapping = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
    getattr(modeling_auto, mapping)["transformer2"] = f"Transformer2{head}"


class Tester:
    """What the common tests ask a model's own tests for."""

    is_training, batch_size, seq_length = True, 5, 7
    num_hidden_layers, hidden_size = SIZE["num_hidden_layers"], SIZE["hidden_size"]
    num_attention_heads, vocab_size = SIZE["num_attention_heads"], SIZE["vocab_size"]
    key_length = encoder_seq_length = seq_length

    def __init__(self, config_class: type, variants: dict[str, Any]):
        self.config_class, self.variants = config_class, variants

    def get_config(self):
        return self.config_class(**SIZE, **self.variants)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, SIZE["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def common_tests(name: str, prefix: str, variants: dict[str, Any]) -> type:
    """A class with all the common tests of one variant."""
    module = transformers if prefix == "Llama" else transformer2
    classes = tuple(getattr(module, prefix + head) for head in HEADS)
    config_class = getattr(module, f"{prefix}Config")

    def set_up(self):
        self.model_tester = Tester(config_class, variants)

    bases = (test_modeling_common.ModelTesterMixin, unittest.TestCase)
    return type(name, bases, {"all_model_classes": classes, "setUp": set_up})


def in_two_layers(options: Any) -> Any:
    """A choice of the tables as it fits these models of two layers."""
    return {**options, "layers": [0]} if isinstance(options, dict) and options.get("layers") else options


CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    **{name: ("Transformer2", {"residual": residual}) for name, residual in RESIDUALS.items()},
    **{
        f"mixer_{name}": ("Transformer2", {"local_mixer": in_two_layers(mixer)})
        for name, mixer in LOCAL_MIXERS.items()
        if name != "none"
    },
}
for name, (prefix, variants) in CHOICES.items():
    globals()[f"Test_{name}"] = common_tests(f"Test_{name}", prefix, variants)
