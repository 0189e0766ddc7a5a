"""How well a causal language model predicts texts, every token alike, as a metric of the library `evaluate`."""

import evaluate

from transformer2.training.evaluation import score_texts
from transformer2.training.metrics import of_texts

USE = """
Args:
    predictions: texts, one string per document.
    model: a checkpoint folder, or the name of one on the Hub.
    sequence_length: tokens per row (default: what the model was made for, 1024 at most).
    rows_per_batch: rows that are computed together.
Returns:
    perplexity: exp(nll).
    nll: nats per token, over all tokens of all texts.
    bits_per_byte: of UTF-8 text; comparable between tokenizers.
    tokens, bytes: that were predicted.
"""


class Likelihood(evaluate.Metric):
    """Perplexity, nats per token and bits per byte."""

    def _info(self) -> evaluate.MetricInfo:
        return of_texts(__doc__, USE)

    def _compute(
        self, predictions: list[str], model: str, sequence_length: int | None = None, rows_per_batch: int = 1
    ) -> dict[str, float]:
        scores = score_texts(model, list(predictions), sequence_length=sequence_length, rows_per_batch=rows_per_batch)
        return {key: scores[key] for key in ("perplexity", "nll", "bits_per_byte", "tokens", "bytes")}
