"""Tiny models for tests."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion.new_parameters import is_new

SIZE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def tokens(batch: int = 2, length: int = 12, seed: int = 1, vocab_size: int = 101) -> torch.Tensor:
    """[batch, length] random token ids, without the padding id 0."""
    return torch.randint(1, vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 3.0, **overrides: Any):
    """A random Llama whose weights are `scale` times as large as at initialisation, so that nothing is near zero."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZE, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 1:  # biases start at zero
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model.to(dtype)


def tiny_model(
    residual: Any = "standard", local_mixer: Any = "none", seed: int = 0, noise: float = 0.3, **overrides: Any
):
    """A random Transformer2 whose new parameters are perturbed, so that no identity start can hide a fault."""
    torch.manual_seed(seed)
    config = Transformer2Config(**{**SIZE, **overrides}, residual=residual, local_mixer=local_mixer)
    model = Transformer2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_new(name):
                parameter.add_(noise * torch.randn_like(parameter))
    return model


RESIDUALS: dict[str, Any] = {
    "standard": "standard",
    "ddl": {"type": "ddl"},
    "ddl_linear": {"type": "ddl", "value": "linear", "gate_hidden_size": 8},
    "ddl_cc": {"type": "ddl", "value_channels": 4},
    "ddl_cc_ec": {"type": "ddl", "value_channels": 2, "expand": True},
    "ddl_tc": {"type": "ddl", "value_channels": 3, "compress": "tokens", "kernel_size": 3},
    "ddl_tc_ec": {"type": "ddl", "value_channels": 4, "compress": "tokens", "expand": True},
    "ddl_identity": {"type": "ddl", "form": "identity"},
    "ddl_identity_tc_ec": {
        "type": "ddl",
        "form": "identity",
        "value_channels": 4,
        "compress": "tokens",
        "expand": True,
        "gate_hidden_size": 8,
    },
    "ddl_identity_cc": {"type": "ddl", "form": "identity", "value_channels": 4},
    "elc_bert": "elc_bert",
    "elc_bert_base": {
        "type": "elc_bert",
        "start": "last",
        "mlp_reads": "attention",
        "normalize": True,
        "final_read": False,
    },
    "elc_bert_identity": {"type": "elc_bert", "form": "identity"},
    "denseformer": {"type": "denseformer"},
    "denseformer_2x1": {"type": "denseformer", "form": "identity", "dilation": 2},
    "denseformer_1x2": {"type": "denseformer", "period": 2},
    "vertical": {"type": "vertical_attention", "key_dim": 8},
    "vertical_identity": {"type": "vertical_attention", "form": "identity", "key_dim": 8},
    "vertical_static": {"type": "vertical_attention", "form": "identity", "weights": "static"},
    "dca": {"type": "dca"},
    "dca_window": {"type": "dca", "form": "identity", "window": 1, "key_norm": True},
    "dca_v2_one_input": {"type": "dca", "grn": "v2", "split_qkv": False},
    "mudd": {"type": "mudd"},
    "mudd_static": {"type": "mudd", "form": "identity", "dynamic": False, "separate_norms": False},
    "mudd_prepost": {"type": "mudd", "form": "identity", "prepost_norm": True, "expand_last": True, "round64": True},
    "attn_res": {"type": "attn_res"},
    "attn_res_full": {
        "type": "attn_res",
        "block_size": 1,
        "num_heads": 4,
        "key_norm": False,
        "final_read": False,
    },
    "attn_res_identity": {"type": "attn_res", "form": "identity", "block_size": 4, "num_heads": 2},
    "delta_attn_res": {"type": "delta_attn_res", "block_size": 1},
    "delta_attn_res_identity": {"type": "delta_attn_res", "form": "identity"},
    "hyper": {"type": "hyper_connections"},
    "hyper_static": {"type": "hyper_connections", "form": "identity", "dynamic": False, "num_streams": 3},
    "hyper_identity": {"type": "hyper_connections", "form": "identity", "num_streams": 7},
    "mhc": {"type": "mhc"},
    "mhc_identity": {"type": "mhc", "form": "identity", "num_streams": 3},
    "laurel": {"type": "laurel", "rank": 4},
    "laurel_all": {"type": "laurel", "form": "identity", "rank": 4, "previous": 3},
    "depth_swa": {"type": "short_swa", "window": 2},
    "depth_swa_layers": {"type": "short_swa", "window": None, "share_weights": False, "num_heads": 2, "norm": False},
    "depth_swa_identity": {"type": "short_swa", "form": "identity"},
}
LOCAL_MIXERS: dict[str, Any] = {
    "none": "none",
    "swa": {"type": "short_swa", "window": 4},
    "swa_long": {"type": "short_swa", "window": 64, "num_heads": 2, "head_dim": 6},
    "swa_chunk": {"type": "short_swa", "window": 3, "mask": "chunk", "rope": False, "layers": [0, 2]},
    "swa_attn": {"type": "short_swa", "site": "attn", "window": 3, "layers": [1, 2]},
    "swa_qkv": {"type": "short_swa", "site": "qkv", "window": 3, "num_heads": 1},
    "conv": "short_conv",
    "conv_gated": {"type": "short_conv", "gated": True, "site": "mlp", "kernel_size": 3, "layers": [0, 1]},
    "conv_qkv": {"type": "short_conv", "site": "qkv", "activation": None, "bias": True, "kernel_size": 2},
    "conv_embedding": {"type": "short_conv", "site": "embedding"},
    "conv_identity": {"type": "short_conv", "form": "identity", "bias": True},
    "conv_gated_identity": {"type": "short_conv", "form": "identity", "gated": True, "site": "attn"},
    "canon": "canon",
    "canon_ac": {"type": "canon", "letters": "AC", "skip": False, "activation": "silu", "kernel_size": 3},
    "canon_identity": {"type": "canon", "form": "identity"},
    "swa_identity": {"type": "short_swa", "form": "identity", "window": 2, "num_heads": 4, "num_kv_heads": 1},
}
IDENTITY_RESIDUALS = [
    name
    for name, residual in RESIDUALS.items()
    if residual == "standard" or (isinstance(residual, dict) and residual.get("form") == "identity")
]
ALMOST_IDENTITY = ["mhc_identity"]  # up to rounding, see depth_mhc.py
EXACT_RESIDUALS = [name for name in IDENTITY_RESIDUALS if name not in ALMOST_IDENTITY]
IDENTITY_MIXERS = [name for name, mixer in LOCAL_MIXERS.items() if name == "none" or "identity" in name]
# One line per case of the contract tests: every residual and every mixer, and some pairs.
CASES: list[tuple[str, str]] = [
    *[(residual, "none") for residual in RESIDUALS],
    *[("standard", mixer) for mixer in LOCAL_MIXERS if mixer != "none"],
    ("ddl", "swa"),
    ("ddl_tc_ec", "swa"),
    ("ddl_cc", "swa_chunk"),
    ("depth_swa", "swa"),
    ("ddl_tc_ec", "canon"),
    ("dca", "conv"),
    ("attn_res", "canon"),
    ("mudd", "conv_qkv"),
    ("hyper", "canon_ac"),
    ("elc_bert", "swa"),
    ("denseformer", "swa_chunk"),
    ("dca", "swa_chunk"),
    ("mudd", "swa_chunk"),
    ("attn_res", "swa"),
    ("hyper", "swa"),
    ("ddl_identity_tc_ec", "swa_identity"),
]
# What goes through a cache: every mixer with two residuals, of which one keeps states of its own there, and every
# residual with two mixers.
PAIRS: list[tuple[str, str]] = [
    *[(residual, mixer) for residual in ("standard", "ddl_tc_ec") for mixer in LOCAL_MIXERS],
    *[(r, mixer) for r in RESIDUALS if r not in ("standard", "ddl_tc_ec") for mixer in ("none", "swa_chunk")],
]


def case(residual: str, mixer: str, **arguments: Any):
    """The tiny model of a case."""
    return tiny_model(RESIDUALS[residual], LOCAL_MIXERS[mixer], **arguments)
