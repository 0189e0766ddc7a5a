"""Inputs that show a difference between two models if there is one, and the comparison of their logits."""

from typing import Any

import torch
from torch import Tensor, nn

from transformer2.compat import CACHE_FIELD
from transformer2.variants import AXES

LONG = 1024
# Of the largest logit, for variants whose identity holds up to rounding: in half precision a flipped last digit of the
# state grows over the layers.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def probe_inputs(config: Any) -> dict[str, dict[str, Tensor]]:
    """Token ids [B, T] per probe, with mask or positions [B, T] where needed; no longer than the model's positions.

    "packed" is a row of two documents, whose positions start again. The positions of "beyond" cross the end of the
    window that the model was first trained with, where rope scaling sets in.
    """
    generator = torch.Generator().manual_seed(0)
    limit = config.max_position_embeddings

    def random_ids(batch: int, length: int) -> Tensor:
        return torch.randint(config.vocab_size, (batch, max(1, min(length, limit))), generator=generator)

    short, long, padded, cached = random_ids(1, 16), random_ids(1, LONG), random_ids(3, 24), random_ids(1, 24)
    special = [i for i in _special_ids(config) if i < config.vocab_size][: short.shape[1]]
    short[0, : len(special)] = torch.tensor(special, dtype=torch.long)
    mask = torch.ones_like(padded)
    for row, padding in enumerate((0, 5, 11)):
        mask[row, : min(padding, padded.shape[1] - 1)] = 0
    beyond = random_ids(1, 24)
    start = max(0, original_window(config) - beyond.shape[1] // 2)
    packed = random_ids(1, 24)
    positions = torch.cat([torch.arange(packed.shape[1] // 2), torch.arange(-(-packed.shape[1] // 2))])
    return {
        "short": {"input_ids": short},
        "long": {"input_ids": long},
        "left_padded": {"input_ids": padded, "attention_mask": mask},
        "right_padded": {"input_ids": padded, "attention_mask": mask.flip(1)},
        "beyond": {"input_ids": beyond, "position_ids": torch.arange(start, start + beyond.shape[1]).unsqueeze(0)},
        "packed": {"input_ids": packed, "position_ids": positions.unsqueeze(0)},
        "cached": {"input_ids": cached},
    }


def original_window(config: Any) -> int:
    """How many positions the model was trained with before its window was stretched, if it was."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("original_max_position_embeddings") or config.max_position_embeddings


def _special_ids(config: Any) -> list[int]:
    ids = []
    for token in (config.bos_token_id, config.eos_token_id, config.pad_token_id):
        ids += token if isinstance(token, list) else [] if token is None or token < 0 else [token]
    return ids


@torch.no_grad()
def run_probe(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> Tensor:
    """Logits [N, V] of the real tokens of one probe; "cached" is a prefill, then one token at a time."""
    if name != "cached":
        logits = model(**inputs, use_cache=False).logits
        mask = inputs.get("attention_mask")
        return logits.flatten(0, 1) if mask is None else logits[mask.bool()]
    logits, cache = [], {}
    for chunk in probe_chunks(name, inputs):
        output = model(**chunk, use_cache=True, **cache)
        logits.append(output.logits)
        cache = {CACHE_FIELD: output[CACHE_FIELD]}
    return torch.cat(logits, dim=1).flatten(0, 1)


def probe_chunks(name: str, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inputs of one probe, call by call: of "cached", a prefill and six single tokens."""
    if name != "cached":
        return [inputs]
    ids = inputs["input_ids"]
    prefill = max(1, ids.shape[1] - 6)
    return [{"input_ids": part} for part in ids.split([prefill] + [1] * (ids.shape[1] - prefill), dim=1)]


def rounding_allowed(config: Any, dtype: torch.dtype) -> float:
    """How far logits may be apart, as a share of the largest, where a variant starts as the model up to rounding.

    Zero, bit for bit, for all the others. Raises nothing: the configuration is a valid one.
    """
    bitwise = all(menu[getattr(config, axis)["type"]].bitwise for axis, menu in AXES.items())
    return 0.0 if bitwise else ROUNDING[dtype]


def within(figures: dict[str, Any], allowed: float) -> bool:
    """Whether logits that `compare` compared are as near as `rounding_allowed` says."""
    return figures["bit_equal"] or figures["max_abs_diff"] <= allowed * figures["largest_logit"]


def compare(expected: Tensor, actual: Tensor) -> dict[str, Any]:
    """How far two sets of logits [N, V] are apart; KL(expected, actual) in nats, the largest over the tokens."""
    if torch.equal(expected, actual):
        return {"bit_equal": True, "tokens": len(expected), "max_abs_diff": 0.0, "max_kl": 0.0, "top1_agreement": 1.0}
    max_kl = max_abs = 0.0
    agreeing = 0
    for old, new in zip(expected.split(64), actual.split(64), strict=True):
        old, new = old.double(), new.double()
        old_log, new_log = old.log_softmax(-1), new.log_softmax(-1)
        max_kl = max(max_kl, (old_log.exp() * (old_log - new_log)).sum(-1).max().item())
        max_abs = max(max_abs, (old - new).abs().max().item())
        agreeing += (old.argmax(-1) == new.argmax(-1)).sum().item()
    return {
        "bit_equal": False,
        "tokens": len(expected),
        "max_abs_diff": max_abs,
        "largest_logit": expected.abs().max().item(),
        "max_kl": max_kl,
        "top1_agreement": agreeing / len(expected),
    }


@torch.no_grad()
def hidden_states(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The embeddings and the output of every layer, [B, T, D] each (the last one after the final norm)."""
    return list(model(**inputs, use_cache=False, output_hidden_states=True).hidden_states)


def first_difference(expected: list[Tensor], actual: list[Tensor]) -> str:
    """Where two lists of hidden states part."""
    for index, (old, new) in enumerate(zip(expected, actual, strict=True)):
        if not torch.equal(old, new):
            place = "the embeddings" if index == 0 else f"layer {index - 1}"
            if not old.isfinite().all():
                return f"{place} (where the source itself computes NaN or infinities: look at its weights)"
            return f"{place} (largest difference {(old - new).abs().max().item():.3g})"
    return "the head or the cache: all layers agree without a cache"
