"""The settings of one arm of a comparison: those of all, but for what its model has no use for.

A pattern for DDL's gates means nothing to the control. Whatever matches in one arm at least is kept where it matches.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from transformer2.errors import UserError
from transformer2.training.lora import add_adapters
from transformer2.training.parameters import named_parameters
from transformer2.training.settings import OptimisationSettings, Settings
from transformer2.training.stages import FOR_THE_WHOLE_RUN, stages


def parameter_names(settings: Settings, config: PreTrainedConfig) -> list[str]:
    """Of the model of a configuration, its adapters included where a stage trains some."""
    adapters = [stage.optimisation.lora for stage in stages(settings) if stage.optimisation.train == "lora"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if adapters:
            add_adapters(model, adapters[0])
    return [name for name, _ in named_parameters(model)]


def check_patterns(settings: Settings, names: Mapping[str, list[str]]) -> None:
    """Raise UserError for a pattern, or a schedule, that matches nothing in any arm. names: of parameters, by arm."""
    everything = {name for of_arm in names.values() for name in of_arm}
    for stage in stages(settings):
        optimisation = stage.optimisation
        patterns = [*optimisation.frozen, *(group.match for group in optimisation.groups)]
        patterns += [rf"\.{name}$" for name in optimisation.anneal]
        for pattern in patterns:
            if not _matches(pattern, everything):
                raise UserError(f"No arm of this comparison has a parameter with a name like {pattern!r}.")


def fit(settings: Settings, names: list[str], *, plain: bool, frozen: list[str], seed: int) -> Settings:
    """The settings for a model with parameters of these names, and its stages in full.

    plain: whether the model has nothing new; then what trains that alone trains adapters where there are some, or
    everything. frozen: more patterns of what is not trained.
    """
    plan = stages(settings)
    adapters = [stage.optimisation.lora for stage in plan if stage.optimisation.train == "lora"]

    def fitted(optimisation: OptimisationSettings) -> OptimisationSettings:
        if plain and optimisation.train == "new":
            instead = {"train": "lora", "lora": adapters[0]} if adapters else {"train": "all"}
            optimisation = dataclasses.replace(optimisation, **instead)
        own = [pattern for pattern in optimisation.frozen if _matches(pattern, names)]
        return dataclasses.replace(
            optimisation,
            frozen=[*own, *frozen],
            groups=[group for group in optimisation.groups if _matches(group.match, names)],
            anneal={key: value for key, value in optimisation.anneal.items() if _matches(rf"\.{key}$", names)},
        )

    def written(stage: Any) -> dict[str, Any]:
        tree = dataclasses.asdict(fitted(stage.optimisation))
        return {"name": stage.name} | {k: v for k, v in tree.items() if k not in (*FOR_THE_WHOLE_RUN, "tokens")}

    return dataclasses.replace(
        settings,
        optimisation=dataclasses.replace(fitted(settings.optimisation), seed=seed),
        stages=[written(stage) for stage in plan] if settings.stages else [],
    )


def arm_settings(settings: Settings, arm: Any, start: Path, output: Path, seed: int) -> Settings:
    """The settings of the run of one arm and seed, which begins with the checkpoint `start`."""
    from transformer2.training.arms import CONTROL

    own = fit(
        settings, parameter_names(settings, arm.config()), plain=arm.name == CONTROL, frozen=arm.frozen, seed=seed
    )
    held_out_by = settings.optimisation.seed if settings.data.hold_out_seed is None else settings.data.hold_out_seed
    return dataclasses.replace(
        own,
        data=dataclasses.replace(settings.data, hold_out_seed=held_out_by),  # the same documents for every seed
        model=str(start),
        output=str(output),
        overwrite=False,
        control=False,
        nulls=[],
        variants=[],
        seeds=[],
    )


def _matches(pattern: str, names: Any) -> bool:
    return any(re.search(pattern, name) for name in names)
