"""The stages of a run: what each of them trains, for how long and how fast."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformer2.errors import UserError
from transformer2.training.settings import OptimisationSettings, Settings, check_optimisation, number_of_tokens
from transformer2.training.strict import build

# One run computes in one way, and the order of its rows depends on how many a step has.
FOR_THE_WHOLE_RUN = ("rows_per_step", "precision", "gradient_checkpointing", "seed", "deterministic")


@dataclass
class Stage:
    """One stage, everything filled in; `optimisation.steps` is its number of steps, also for a budget of tokens."""

    name: str
    optimisation: OptimisationSettings


def stages(settings: Settings) -> list[Stage]:
    """The stages of a run, at least one.

    Raises UserError for keys and values that make no sense, and for stages that cannot follow one another.
    """
    if not settings.stages:
        return [Stage("training", _with_steps(settings, settings.optimisation, "optimisation"))]
    defaults, found = dataclasses.asdict(settings.optimisation), []
    for index, given in enumerate(settings.stages):
        where = f"stages[{index}]"
        given = dict(given)
        name = given.pop("name", f"stage {index + 1}")
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}.name must be a word or two, got {name!r}.")
        if fixed := [key for key in FOR_THE_WHOLE_RUN if key in given]:
            raise UserError(f"{where}.{fixed[0]} is the same in all stages: set optimisation.{fixed[0]}.")
        if ("steps" in given) == ("tokens" in given):
            raise UserError(f"{where} needs either `steps` or `tokens`.")
        inherited = {**defaults, "tokens": None, "anneal": {}}
        optimisation = build(OptimisationSettings, _merged(inherited, given), where)
        check_optimisation(optimisation, where)
        found.append(Stage(name, _with_steps(settings, optimisation, where)))
    names = [stage.name for stage in found]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise UserError(f"Two stages are called {doubled[0]!r}: give each its own name.")
    trains = [stage.optimisation.train for stage in found]
    if "lora" in trains and "all" in trains:
        raise UserError(
            "One run cannot have stages with train=lora and with train=all, because its adapters are for the model "
            "that it starts from: make two runs of it."
        )
    if "lora" in trains and "new" in trains[trains.index("lora") :]:
        raise UserError("A stage with train=new cannot follow one with train=lora: put it first.")
    if len({str(stage.optimisation.lora) for stage in found if stage.optimisation.train == "lora"}) > 1:
        raise UserError("The settings `lora` must be the same in all stages: set optimisation.lora.")
    return found


def _with_steps(settings: Settings, optimisation: OptimisationSettings, where: str) -> OptimisationSettings:
    tokens = number_of_tokens(optimisation.tokens, f"{where}.tokens")
    if tokens is None:
        return optimisation
    per_step = optimisation.rows_per_step * settings.data.sequence_length
    return dataclasses.replace(optimisation, steps=math.ceil(tokens / per_step))


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `defaults`, sections such as lr key by key."""
    merged = dict(defaults)
    for key, value in given.items():
        section = isinstance(merged.get(key), dict) and isinstance(value, Mapping) and key != "anneal"
        merged[key] = _merged(merged[key], value) if section else value
    return merged
