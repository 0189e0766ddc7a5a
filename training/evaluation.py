"""How well a causal language model predicts a text: perplexity, bits per byte, and the distance to a base model."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer2.conversion.paths import plain_os_errors
from transformer2.errors import CheckFailed, UserError
from transformer2.training.data import read_documents, tokenize
from transformer2.training.loading import default_device, find_checkpoint, load_model, load_tokenizer, loading_dtype
from transformer2.training.packing import IGNORED, Row, collate

POSITIONS_AT_ONCE = 512  # whose log-probabilities over the whole vocabulary are in memory together


def score(
    model: nn.Module,
    batches: Iterable[list[Row]],
    base: nn.Module | None = None,
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], Any] = lambda tokens: None,
) -> Tensor:
    """Sums over all targets of the rows: [targets, nats, bytes, nats of the base, KL(base || model), agreements].

    The last three are 0 without a base. Only sums, so that the parts that several processes did can be added up.
    """
    sums = torch.zeros(6, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    with torch.no_grad():
        for rows in batches:
            batch = collate(rows, device)
            labels = batch.pop("labels")
            num_bytes = sum(int(row.num_bytes[row.labels != IGNORED].sum()) for row in rows)
            is_target = labels[:, 1:].flatten() != IGNORED
            targets = labels[:, 1:].flatten()[is_target]
            sums[0] += len(targets)
            sums[2] += num_bytes
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[is_target]
            if base is not None:
                base_logits = base(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)[is_target]
            for start in range(0, len(targets), POSITIONS_AT_ONCE):
                part = slice(start, start + POSITIONS_AT_ONCE)
                log_p = logits[part].float().log_softmax(-1)
                sums[1] += F.nll_loss(log_p, targets[part], reduction="none").double().sum()
                if base is not None:
                    base_log_p = base_logits[part].float().log_softmax(-1)
                    sums[3] += F.nll_loss(base_log_p, targets[part], reduction="none").double().sum()
                    sums[4] += (base_log_p.exp() * (base_log_p - log_p)).sum(-1).double().sum()
                    sums[5] += (base_log_p.argmax(-1) == log_p.argmax(-1)).sum()
            on_batch(len(targets))
    model.train(training)
    return sums


def likelihood(targets: float, nats: float, num_bytes: float) -> dict[str, Any]:
    """nll (nats per token), perplexity (its exponential) and bits_per_byte (of text; None without bytes)."""
    nll = nats / targets
    return {
        "nll": nll,
        "perplexity": math.exp(nll) if nll < 700 else math.inf,
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else None,
    }


@plain_os_errors()
def evaluate(
    model: str | Path,
    text: str | Path | list[str],
    *,
    against: str | Path | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    dtype: str = "auto",
    rows_per_batch: int = 1,
    text_column: str = "text",
    separator: str | None = None,
    split: str = "train",
    on_start: Callable[[int], Any] = lambda tokens: None,
    on_batch: Callable[[int], Any] = lambda tokens: None,
) -> dict[str, Any]:
    """Score a checkpoint on a text, and optionally compare it with another one on the same tokens.

    text: as `data.train` of a training run: files, data set folders or hub data sets. against: a second checkpoint
    with the same tokenizer. sequence_length: tokens per row (default: what the model was made for, 1024 at most);
    tokens see earlier ones of their document and row only. max_tokens: score only the beginning. dtype: "auto" (as
    stored), "float32", "bfloat16" or "float16". on_start and on_batch are told how many tokens there are, and were
    scored.

    -> documents, tokens (scored), bytes (of UTF-8 text that they cover), nll (nats per token), perplexity,
    bits_per_byte, sequence_length, dtype, seconds, tokens_per_second; with `against` also base {nll, perplexity,
    bits_per_byte}, kl (mean KL(base || model) per token, in nats) and top1_agreement.
    Raises UserError for bad input, CheckFailed where a model's output is not finite.
    """
    return score_texts(
        find_checkpoint(model),  # before a text that may be large
        read_documents(text, text_column, separator, split),
        against=against,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
        dtype=dtype,
        rows_per_batch=rows_per_batch,
        on_start=on_start,
        on_batch=on_batch,
    )


def score_texts(
    model: str | Path,
    documents: list[str],
    *,
    against: str | Path | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    dtype: str = "auto",
    rows_per_batch: int = 1,
    on_start: Callable[[int], Any] = lambda tokens: None,
    on_batch: Callable[[int], Any] = lambda tokens: None,
) -> dict[str, Any]:
    """`evaluate`, on documents in memory."""
    for name, value in (("sequence length", sequence_length), ("number of tokens", max_tokens)):
        if value is not None and value < 2:
            raise UserError(
                f"The {name} must be at least 2, got {value}: each token is predicted from those before it."
            )
    torch_dtype = loading_dtype(dtype)
    folder = find_checkpoint(model)
    base_folder = find_checkpoint(against) if against is not None else None
    tokenizer = load_tokenizer(folder)
    packed = tokenize(documents, tokenizer, count_bytes=True).head(max_tokens)
    if base_folder is not None:
        _check_same_tokens(documents[0], tokenizer, load_tokenizer(base_folder))

    device = default_device()
    network = load_model(folder, torch_dtype).to(device).eval()
    base = load_model(base_folder, torch_dtype).to(device).eval() if base_folder is not None else None
    sequence_length = sequence_length or min(1024, getattr(network.config, "max_position_embeddings", None) or 1024)
    rows = packed.rows(sequence_length)
    on_start(sum(row.num_targets for row in rows))

    start = time.perf_counter()
    batches = (
        [rows[i] for i in range(at, min(at + rows_per_batch, len(rows)))] for at in range(0, len(rows), rows_per_batch)
    )
    targets, nats, num_bytes, base_nats, divergence, agreements = score(
        network, batches, base, device, on_batch
    ).tolist()
    seconds = time.perf_counter() - start
    if not math.isfinite(nats + base_nats):
        raise CheckFailed(f"The loss on this text is not finite ({nats / targets}): the model's output is broken.")
    report = {
        "documents": len(packed.lengths),
        "tokens": int(targets),
        "bytes": int(num_bytes),
        **likelihood(targets, nats, num_bytes),
        "sequence_length": sequence_length,
        "dtype": str(network.dtype).removeprefix("torch."),
        "seconds": seconds,
        "tokens_per_second": targets / seconds,
    }
    if base is not None:
        report["base"] = likelihood(targets, base_nats, num_bytes)
        report["kl"] = divergence / targets
        report["top1_agreement"] = agreements / targets
    return report


def _check_same_tokens(text: str, tokenizer, base_tokenizer) -> None:
    sample = text[:10_000]
    if tokenizer(sample, verbose=False)["input_ids"] != base_tokenizer(sample, verbose=False)["input_ids"]:
        raise UserError("The two checkpoints have different tokenizers, so their predictions cannot be compared.")
