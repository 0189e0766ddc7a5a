"""Two models on the same held-out documents: what each document costs, and whether the difference is chance."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from transformer2.training.loss import IGNORED, target_nats
from transformer2.training.packing import Rows, collate

RESAMPLES = 10_000
COVERAGE = 0.95
FEWEST_DOCUMENTS = 5  # a bootstrap over fewer says little


@dataclass
class DocumentScores:
    """targets [N] (tokens that are predicted) and nats [N] (the sum of their -log p) of N documents.

    num_bytes: of text that all targets together cover.
    """

    targets: np.ndarray
    nats: np.ndarray
    num_bytes: int = 0

    @property
    def nll(self) -> float:
        """Nats per token, over all documents."""
        return float(self.nats.sum() / self.targets.sum())


def score_documents(
    model: nn.Module,
    rows: Rows,
    rows_per_batch: int = 1,
    device: torch.device | str = "cpu",
    on_batch: Callable[[int], Any] = lambda tokens: None,
) -> DocumentScores:
    """The nats of every document of packed rows; a document that was cut adds up from its pieces."""
    num_documents = len(rows.text.lengths)
    targets, nats, num_bytes = np.zeros(num_documents, dtype=np.int64), np.zeros(num_documents), 0
    training = model.training
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(rows), rows_per_batch):
            indices = range(begin, min(begin + rows_per_batch, len(rows)))
            packed = [rows[i] for i in indices]
            num_bytes += sum(int(row.num_bytes[row.labels != IGNORED].sum()) for row in packed)
            batch = collate(packed, device)
            labels = batch.pop("labels")
            losses = target_nats(model(**batch, use_cache=False).logits, labels).double().cpu().numpy()
            for index, row_losses, row_labels in zip(indices, losses, labels.cpu().numpy(), strict=True):
                document = rows.documents(index)[1:]
                is_target = row_labels[1 : len(document) + 1] != IGNORED
                np.add.at(targets, document[is_target], 1)
                np.add.at(nats, document[is_target], row_losses[: len(document)][is_target])
            on_batch(int((labels[:, 1:] != IGNORED).sum()))
    model.train(training)
    return DocumentScores(targets, nats, num_bytes)


def paired_difference(
    model: list[DocumentScores], control: list[DocumentScores], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """How many nats per token `model` needs more than `control` on the same documents; below 0, it is better.

    model, control: one entry per seed of training; a document counts with its mean over them.
    -> difference; interval: of the percentile bootstrap over documents (Efron and Tibshirani 1993, 13.3), which keeps
    the two scores of a document together, None for fewer than five documents; documents; better_documents (the share
    on which `model` needs less); per_seed: the difference of each seed.
    """
    targets = model[0].targets
    if any(not np.array_equal(scores.targets, targets) for scores in [*model, *control]):
        raise ValueError("Paired scores must be of the same documents.")
    scored = targets > 0
    targets = targets[scored]
    gains = np.mean([a.nats - b.nats for a, b in zip(model, control, strict=True)], axis=0)[scored]
    num_documents = len(targets)
    interval = None
    if num_documents >= FEWEST_DOCUMENTS:
        random, estimates = np.random.default_rng(seed), []
        at_once = max(1, 4_000_000 // num_documents)
        for begin in range(0, resamples, at_once):
            size = min(at_once, resamples - begin)
            drawn = random.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=size)
            estimates.append((drawn @ gains) / (drawn @ targets))
        tail = (1 - COVERAGE) / 2
        interval = np.quantile(np.concatenate(estimates), [tail, 1 - tail]).tolist()
    return {
        "difference": float(gains.sum() / targets.sum()),
        "interval": interval,
        "documents": num_documents,
        "better_documents": float((gains < 0).mean()),
        "per_seed": [a.nll - b.nll for a, b in zip(model, control, strict=True)],
    }


def verdict(paired: dict[str, Any]) -> str:
    """ "helped", "hurt" or "undecided": the interval has to lie on one side of 0, and all seeds with it."""
    if paired["interval"] is None:
        return "undecided"
    low, high = paired["interval"]
    if high < 0 and all(difference < 0 for difference in paired["per_seed"]):
        return "helped"
    if low > 0 and all(difference > 0 for difference in paired["per_seed"]):
        return "hurt"
    return "undecided"
