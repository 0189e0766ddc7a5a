"""What a training run would do and what stands in its way, before anything is trained: `transformer2 doctor`."""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.training import diagnosis, memory, parameters, precision
from transformer2.training.arms import CONTROL, Arm, is_comparison, plan_arms
from transformer2.training.data_report import data_stats
from transformer2.training.fitting import arm_settings
from transformer2.training.isolation import check_isolation
from transformer2.training.loading import find_checkpoint, load_model, load_tokenizer, stored_dtypes
from transformer2.training.lora import add_adapters
from transformer2.training.rows import load_rows
from transformer2.training.saving import check_output
from transformer2.training.settings import Settings
from transformer2.training.stages import Stage, stages
from transformer2.training.tracking import check_trackers

MANY_EPOCHS = 4  # repeating data more often gains next to nothing (Muennighoff et al. 2023, arXiv:2305.16264)


def doctor(settings: Settings) -> dict[str, Any]:
    """Everything that `train` with these settings would find wrong at its start, and what it would train.

    -> problems (sentences; a run would end with the first one), warnings, precision, memory_available (bytes), data
    (as `data_stats`), isolation ("kept", or why it was not tested) and arms: a list of {name, about, stages}, each
    stage with name, train, steps, groups ({name, count, lr, weight_decay, parameters: patterns with their numbers}),
    trained, frozen, memory (bytes by what they are for). Nothing is written.
    Raises UserError only where settings contradict themselves.
    """
    problems: list[str] = []

    def tried(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except UserError as error:
            problems.append(str(error))
            return None

    plan = stages(settings)
    output = Path(os.path.abspath(user_path(settings.output)))
    source = None if isinstance(settings.model, dict) else tried(find_checkpoint, settings.model)
    if source is not None and not is_comparison(settings):
        tried(check_output, output, source, settings.overwrite)
    tried(check_trackers, settings.tracking)
    chosen = precision.choose(settings.optimisation.precision)
    arms = tried(_arms, settings, source) if source is not None or isinstance(settings.model, dict) else None
    report: dict[str, Any] = {"problems": problems, "warnings": [], "precision": chosen}
    device = torch.device("cpu") if precision.on_cpu() else torch.accelerator.current_accelerator()
    report["memory_available"] = memory.available(device)
    report["data"] = tried(data_stats, settings)
    report["arms"] = []
    for arm in arms or ():
        described = tried(_describe, arm, settings, source, chosen)
        if described is not None:
            report["arms"].append(described)
    needed = max((stage["memory"]["total"] for arm in report["arms"] for stage in arm["stages"]), default=0)
    if source is None or problems:
        report["isolation"] = "tested when the run starts"
    elif needed > report["memory_available"]:
        report["isolation"] = "not tested here: the model needs more memory than is free"
    else:
        report["isolation"] = tried(_isolation, settings, source, chosen, device) or "broken"
    report["warnings"] = _warnings(settings, plan, report, arms or [])
    return report


def _arms(settings: Settings, source: Path | None) -> list[Arm]:
    if is_comparison(settings):
        return plan_arms(settings)
    import transformer2  # noqa: F401  registers the model family

    config = AutoConfig.from_pretrained(source)
    return [Arm(source.name, "the run", lambda folder, seed: source, lambda: config)]


def _describe(arm: Arm, settings: Settings, source: Path | None, chosen: str) -> dict[str, Any]:
    """What the stages of one arm train, and the memory of each."""
    if is_comparison(settings):
        settings = arm_settings(
            settings, arm, source or Path("start"), Path(settings.output), settings.optimisation.seed
        )
    plan = stages(settings)
    dtypes = {torch.float32} if source is None else set(stored_dtypes(source).values())
    everything = "all" if any(stage.optimisation.train == "all" for stage in plan) else "new"
    dtype = precision.load_dtype(chosen, everything, dtypes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(arm.config(), dtype=dtype, trust_remote_code=False)
    adapted, described = False, []
    for stage in plan:
        if stage.optimisation.train == "lora" and not adapted:
            add_adapters(model, stage.optimisation.lora)
            adapted = True
        described.append(_stage(model, stage, settings, chosen))
    return {"name": arm.name, "about": arm.about, "stages": described}


def _stage(model, stage: Stage, settings: Settings, chosen: str) -> dict[str, Any]:
    optimisation = stage.optimisation
    parameters.select(model, optimisation.train, optimisation.frozen)
    for name, parameter in parameters.named_parameters(model):
        if name.rpartition(".")[2] in optimisation.anneal:
            parameter.requires_grad_(False)
    precision.make_masters(model)
    groups = parameters.parameter_groups(
        model, dataclasses.asdict(optimisation.lr), optimisation.weight_decay, optimisation.groups
    )
    counts = parameters.count_parameters(model)
    return {
        "name": stage.name,
        "train": optimisation.train,
        "steps": optimisation.steps,
        "groups": [
            {
                **{key: group[key] for key in ("name", "kind", "count", "lr", "weight_decay")},
                "parameters": patterns(group["param_names"]),
            }
            for group in groups
        ],
        "trained": sum(kind["trained"] for kind in counts.values()),
        "frozen": sum(kind["frozen"] for kind in counts.values()),
        "memory": memory.estimate(model, optimisation, settings.data.sequence_length, chosen),
    }


def patterns(names: list[str]) -> dict[str, int]:
    """Names of parameters with their numbers replaced by *, and how many there are of each."""
    found: dict[str, int] = {}
    for name in names:
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        found[pattern] = found.get(pattern, 0) + 1
    return found


def _isolation(settings: Settings, source: Path, chosen: str, device: torch.device) -> str:
    rows, _ = load_rows(settings, load_tokenizer(source))
    model = load_model(source, torch.bfloat16 if chosen == "bf16" else torch.float32).to(device)
    rows.check_vocabulary(model.config.vocab_size)
    tested = check_isolation(model, rows.sample(), device)
    return "kept" if tested else "nothing to keep apart: no row holds two documents"


def _warnings(settings: Settings, plan: list[Stage], report: dict[str, Any], arms: list[Arm]) -> list[str]:
    found = []
    optimisation, data = settings.optimisation, settings.data
    for arm in report["arms"]:
        for stage in arm["stages"]:
            if stage["memory"]["total"] > report["memory_available"]:
                found.append(
                    f"{arm['name']}, {stage['name']}: a step needs about {stage['memory']['total'] / 2**30:.1f} GiB, "
                    f"and {report['memory_available'] / 2**30:.1f} GiB are free: lower optimisation.rows_per_batch or "
                    "data.sequence_length, set optimisation.gradient_checkpointing, or shard (configs/accelerate)."
                )
    for arm in arms:
        config = arm.config()
        plain = arm.name == CONTROL
        found += [] if plain else diagnosis.unusual_rates([stage.optimisation for stage in plan], config)
        longest = getattr(config, "max_position_embeddings", None)
        if longest and data.sequence_length > longest:
            found.append(f"data.sequence_length is {data.sequence_length}, and {arm.name} was made for {longest}.")
    if optimisation.rows_per_step % optimisation.rows_per_batch:
        found.append(
            f"optimisation.rows_per_step ({optimisation.rows_per_step}) is no multiple of rows_per_batch "
            f"({optimisation.rows_per_batch}): the last batch of every step is smaller than there is room for."
        )
    if not (data.eval or data.eval_tokens or data.eval_fraction):
        found.append("Nothing is held out, so nobody will know whether the run helped: set data.eval_tokens.")
    train = (report["data"] or {}).get("train") or {}
    if train.get("epochs", 0) > MANY_EPOCHS:
        found.append(f"The run sees its data {train['epochs']:.1f} times; beyond {MANY_EPOCHS} little is gained.")
    if train.get("fill", 1) < 0.5:
        found.append(
            f"Rows are {train['fill']:.0%} full: lower data.sequence_length, or set data.packing=concatenated."
        )
    return list(dict.fromkeys(found))
