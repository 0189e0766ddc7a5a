"""What a finished run should make its owner think about."""

import math
from typing import Any

from transformer2.training.settings import OptimisationSettings

SUGGESTED = {"ddl": "1e-3 to 3e-3 for DDL", "short_swa": "3e-4 to 5e-4 for ShortSWA"}  # as in the README
SUGGESTED_PRETRAINED = "about 2e-5 for pretrained parameters"
LARGEST_SENSIBLE = 0.1  # a step of AdamW moves every parameter by about its learning rate
WORSE = 1.5  # held-out perplexity at the end over that at the start
LOSS_RISE = 1.0  # nats: the loss of single steps is noisy


def warnings(
    stages: list[OptimisationSettings], config: Any, evaluations: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> list[str]:
    """One sentence or two for each sign that the learning rates do not suit the model.

    stages: what each one trains, and how fast. config: of the model.
    evaluations, steps: as in the report; without evaluations, the loss of the steps decides.
    """
    found = unusual_rates(stages, config)
    everything = any(_all(optimisation) for optimisation in stages)
    if evaluations:
        before, after = evaluations[0]["perplexity"], evaluations[-1]["perplexity"]
        worse = after > WORSE * before
        what = f"Held-out perplexity rose from {before:.3f} to {after:.3f}"
    else:
        first, last = steps[0]["loss"], steps[-1]["loss"]
        worse = last - first > LOSS_RISE
        what = f"The loss rose from {first:.3f} to {last:.3f}"
    if worse or (evaluations and not math.isfinite(after)):
        found.append(
            f"{what}: the run has made the model worse, most likely because the learning rate is too high; usual are "
            f"{suggested(config, everything)}."
        )
    return found


def unusual_rates(stages: list[OptimisationSettings], config: Any) -> list[str]:
    """A sentence for each learning rate that no model survives."""
    found = []
    everything = any(_all(optimisation) for optimisation in stages)
    rates = {("new", optimisation.lr.new) for optimisation in stages}
    rates |= {("pretrained", optimisation.lr.pretrained) for optimisation in stages if _all(optimisation)}
    rates |= {("lora", optimisation.lr.lora) for optimisation in stages if optimisation.train == "lora"}
    for kind, rate in sorted(rates):
        if rate > LARGEST_SENSIBLE:
            found.append(
                f"The learning rate optimisation.lr.{kind} = {rate:g} moves every parameter by about {rate:g} in each "
                f"step, which destroys what it knows; usual are {suggested(config, everything)}."
            )
    return found


def suggested(config: Any, pretrained: bool) -> str:
    """The usual learning rates of what is trained in a model of this configuration."""
    kinds = {(getattr(config, axis, None) or {}).get("type") for axis in ("residual", "local_mixer")}
    rates = [rate for kind, rate in SUGGESTED.items() if kind in kinds]
    return ", ".join([*rates, *([SUGGESTED_PRETRAINED] if pretrained or not rates else [])])


def _all(optimisation: OptimisationSettings) -> bool:
    return optimisation.train == "all"
