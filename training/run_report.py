"""What training_report.json says of a run."""

import dataclasses
from pathlib import Path
from typing import Any

from transformer2.training import diagnosis
from transformer2.training.settings import Settings
from transformer2.training.stages import Stage
from transformer2.training.state import Counters


def build_report(
    settings: Settings,
    stages: list[Stage],
    counters: Counters,
    config: Any,
    facts: dict[str, Any],
    mfu: float | None,
) -> dict[str, Any]:
    """config: of the model. facts: precision, processes, parameters and so on, as they are."""
    evaluations, steps = counters.evaluations, counters.history
    return {
        "settings": shareable(settings),
        **facts,
        "tokens": counters.tokens,
        "seconds": counters.seconds,
        "tokens_per_second": counters.tokens / counters.seconds,
        "flops_per_token": counters.flops / counters.tokens,
        "mfu": mfu,
        "perplexity_before": evaluations[0]["perplexity"] if evaluations else None,
        "perplexity_after": evaluations[-1]["perplexity"] if evaluations else None,
        "evaluations": evaluations,
        "best": counters.best,
        "stages": counters.stages,
        "skipped_steps": counters.skipped,
        "warnings": diagnosis.warnings([stage.optimisation for stage in stages], config, evaluations, steps),
        "steps": steps,
    }


def stage_summary(stage: Stage, counters: Counters, began: dict[str, Any] | None) -> dict[str, Any]:
    """What a stage has done, and for a schedule of parameters (anneal) what it cost in held-out loss.

    began: the last evaluation before its first step.
    """
    summary = {
        "name": stage.name,
        "train": stage.optimisation.train,
        "steps": counters.stage_step,
        "ended_early": counters.ended,
        "nll_before": began["nll"] if began else None,
        "nll_after": counters.evaluations[-1]["nll"] if counters.evaluations else None,
    }
    if stage.optimisation.anneal:
        cost = None if began is None else summary["nll_after"] - summary["nll_before"]
        summary["anneal"] = {"targets": stage.optimisation.anneal, "parameters": len(counters.annealed or {})}
        summary["anneal"]["cost_in_nats"] = cost
        if cost is not None:
            moved = " and ".join(f"{name} to {value:g}" for name, value in stage.optimisation.anneal.items())
            change = "rose" if cost > 0 else "fell"
            summary["anneal"]["sentence"] = (
                f"While {moved} moved, the held-out loss {change} by {abs(cost):.4f} nats per token."
            )
    return summary


def shareable(settings: Settings) -> dict[str, Any]:
    """The settings without the folders of this machine: of paths only the last part."""

    def last_part(value: Any) -> Any:
        if isinstance(value, list):
            return [last_part(item) for item in value]
        return Path(value).name if isinstance(value, str) and Path(value).exists() else value

    tree = dataclasses.asdict(settings)
    names = settings.model.items() if isinstance(settings.model, dict) else ()
    tree["model"] = {key: last_part(value) for key, value in names} or last_part(settings.model)
    tree["output"] = Path(settings.output).name
    for key in ("train", "eval", "chat_template"):
        tree["data"][key] = last_part(getattr(settings.data, key))
    tree["tracking"]["folder"] = Path(settings.tracking.folder).name
    return tree
