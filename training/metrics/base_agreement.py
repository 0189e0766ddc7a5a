"""How far a model is from the one that it was made from, on texts, as a metric of the library `evaluate`."""

import evaluate

from transformer2.training.evaluation import score_texts
from transformer2.training.metrics import of_texts

USE = """
Args:
    predictions: texts, one string per document.
    model, base: checkpoint folders, or names of some on the Hub, with the same tokenizer.
    sequence_length: tokens per row (default: what the model was made for, 1024 at most).
    rows_per_batch: rows that are computed together.
Returns:
    kl: mean KL(base || model) per token, in nats.
    top1_agreement: share of the tokens where both have the same first choice.
    nll, base_nll: nats per token of both.
    tokens: that were predicted.
"""


class BaseAgreement(evaluate.Metric):
    """KL divergence from the base, and agreement with its first choice."""

    def _info(self) -> evaluate.MetricInfo:
        return of_texts(__doc__, USE)

    def _compute(
        self,
        predictions: list[str],
        model: str,
        base: str,
        sequence_length: int | None = None,
        rows_per_batch: int = 1,
    ) -> dict[str, float]:
        scores = score_texts(
            model,
            list(predictions),
            against=base,
            sequence_length=sequence_length,
            rows_per_batch=rows_per_batch,
        )
        kept = {key: scores[key] for key in ("kl", "top1_agreement", "nll", "tokens")}
        return {**kept, "base_nll": scores["base"]["nll"]}
