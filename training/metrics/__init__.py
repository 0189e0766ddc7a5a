"""Metrics in the form of the library `evaluate`: `evaluate.load(metrics.path("likelihood"))`, without a network.

likelihood      perplexity, nats per token and bits per byte of a causal model on texts; every token counts alike
base_agreement  mean KL(base || model) per token, and how often both have the same first choice
"""

from pathlib import Path
from typing import Any

from transformer2.errors import UserError

METRICS = ("likelihood", "base_agreement")


def of_texts(description: str, use: str) -> Any:
    """The `evaluate.MetricInfo` of a metric whose predictions are texts, one string per document."""
    import datasets
    import evaluate

    texts = datasets.Features({"predictions": datasets.Value("string")})
    return evaluate.MetricInfo(description=description, citation="", inputs_description=use, features=texts)


def path(name: str) -> str:
    """What `evaluate.load` takes to load the metric of this name. Raises UserError for an unknown one."""
    if name not in METRICS:
        raise UserError(f"There is no metric {name!r}; choose from: {', '.join(METRICS)}.")
    return str(Path(__file__).with_name(f"{name}.py"))
