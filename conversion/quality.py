"""L4: the converted model has the source's perplexity on a text, and continues prompts with the same tokens."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer2 import Transformer2Config
from transformer2.conversion.checkpoints import Checkpoint
from transformer2.conversion.layer_logits import check_logits_by_layer
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.logits import load_converted, load_llama
from transformer2.errors import UserError

SAMPLE = """\
A river begins as rain. Water that falls on high ground finds the lowest way down, joins other water, and cuts a bed
that the next rain will follow. Over a thousand years the bed moves: the outer bank of a bend is worn away, the inner
bank grows, and the bend creeps sideways until the river breaks through its neck and leaves a lake behind. People have
always settled beside rivers. They carry boats, turn mills and feed fields, and they flood. Where the forests on the
upper slopes are cut, the floods rise higher: "The wood," said an old miller, "holds back what the walls cannot."
"""
PROMPTS = ("A river begins as", "People have always", "def add(a, b):")
MAX_TOKENS = 512
NEW_TOKENS = 16


def sample_tokens(folder: Path, config: Any, text: Path | None = None) -> tuple[Tensor, list[Tensor], str]:
    """Token ids [1, T] of a text, those of the prompts, and in words what they are.

    text: a file; by default a sample of ours. Without a tokenizer in `folder` the ids are random. Raises UserError if
    the text cannot be read, or is too short.
    """
    limit = min(MAX_TOKENS, config.max_position_embeddings)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        if text is not None:
            raise UserError(f"{folder} has no tokenizer, so a text cannot be scored; leave the text out.")
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(config.vocab_size, (1, limit), generator=generator)
        return ids, [ids[:, : min(8, limit)]], "random tokens, for want of a tokenizer"
    from transformers import AutoTokenizer

    try:
        content = SAMPLE if text is None else text.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{text} is no UTF-8 text.") from None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(content, return_tensors="pt", verbose=False)["input_ids"][:, :limit].long()
    if ids.shape[1] < 2:
        raise UserError(f"{text} has fewer than two tokens, so nothing can be predicted; give a longer text.")
    prompts = [tokenizer(prompt, return_tensors="pt")["input_ids"].long() for prompt in PROMPTS]
    return ids, prompts, "a sample text" if text is None else text.name


def check_quality(source: LlamaSource, output: Path, dtype: torch.dtype, text: Path | None = None) -> dict[str, Any]:
    """Negative log-likelihood (nats per token) of both models, and whether they continue every prompt alike."""
    ids, prompts, what = sample_tokens(output, source.config, text)
    figures, continued = [], []
    for load in (lambda: load_llama(source, dtype), lambda: load_converted(output, dtype)[0]):
        model = load()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
            figures.append(nats(logits[:-1], ids[0, 1:]) / (ids.shape[1] - 1))
            continued.append([_continue(model, prompt) for prompt in prompts])
        del model, logits
    return {
        **_figures(*figures, ids.shape[1] - 1, what),
        "prompts": len(prompts),
        "same_continuations": sum(torch.equal(old, new) for old, new in zip(*continued, strict=True)),
    }


def check_quality_by_layer(
    source: LlamaSource,
    output: Checkpoint,
    config: Transformer2Config,
    dtype: torch.dtype,
    text: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """As `check_quality`, with one layer of each network in memory at a time, and so without continuations."""
    ids, _, what = sample_tokens(output.folder, source.config, text)
    sums, done = [0.0, 0.0], 0

    def add(probe: str, old: Tensor, new: Tensor) -> None:
        nonlocal done
        targets = ids[0, done + 1 : done + 1 + len(old)]
        for side, logits in enumerate((old, new)):
            sums[side] += nats(logits[: len(targets)], targets)
        done += len(old)

    check_logits_by_layer(source, output, config, dtype, math.inf, say, {"text": {"input_ids": ids}}, add)
    return _figures(*(total / (ids.shape[1] - 1) for total in sums), ids.shape[1] - 1, what)


def nats(logits: Tensor, targets: Tensor) -> float:
    """logits [N, V], targets [N] -> the sum of -log p"""
    return F.cross_entropy(logits.double(), targets, reduction="sum").item()


def _continue(model: nn.Module, prompt: Tensor) -> Tensor:
    """A prompt with the likeliest next tokens, one after the other."""
    length = min(NEW_TOKENS, model.config.max_position_embeddings - prompt.shape[1])
    if length < 1:
        return prompt
    options = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)


def _figures(base: float, new: float, targets: int, what: str) -> dict[str, Any]:
    return {"text": what, "tokens": targets, "base_nll": base, "nll": new, "difference": abs(new - base)}
