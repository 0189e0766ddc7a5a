"""Several runs that differ in one thing, and what the difference is worth: the control run, nulls, variants, seeds.

Every arm is an ordinary training run (`training.finetune.train`) on the same data, order, steps and seeds. All are
then scored on the same held-out documents, and compared document by document. `output` holds

    report.json, report.md, curves.png     what came out
    ARM-seedN/                             the trained model of each run
    comparison.json                        the settings: the same command goes on with the runs that are missing
"""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from transformer2.conversion.files import write_json
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.errors import UserError
from transformer2.training import precision
from transformer2.training.arms import CONTROL, Arm, plan_arms
from transformer2.training.comparison_plot import plot_curves
from transformer2.training.comparison_report import to_markdown, with_comparisons
from transformer2.training.evaluation import likelihood
from transformer2.training.fitting import arm_settings
from transformer2.training.loading import load_model, load_tokenizer
from transformer2.training.paired import DocumentScores, score_documents
from transformer2.training.rows import load_rows
from transformer2.training.run_report import shareable
from transformer2.training.settings import Settings

MARKER = "comparison.json"
CURVE = ("step", "loss")  # of the steps in the report


@plain_os_errors()
def compare(settings: Settings) -> dict[str, Any]:
    """Train and score every arm, write the report into `settings.output` and return it.

    Runs that are there already, from the same settings, are kept. Raises UserError for bad input before anything is
    trained, and what `train` raises.
    """
    from transformer2.training.finetune import train

    data = settings.data
    if data.eval is None and not (data.eval_tokens or data.eval_fraction):
        raise UserError("A comparison needs held-out text: set data.eval, data.eval_tokens or data.eval_fraction.")
    arms = plan_arms(settings)
    seeds = settings.seeds or [settings.optimisation.seed]
    output = Path(os.path.abspath(user_path(settings.output)))
    process = PartialState(cpu=precision.on_cpu())
    _claim(output, settings, process)

    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    scores: dict[str, list[DocumentScores]] = {arm.name: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            folder = output / f"{_file_name(arm.name)}-seed{seed}"
            start = output / f"start-of-{folder.name}"
            if not (folder / "training_report.json").is_file():
                if process.is_main_process:
                    print(f"{arm.name}, seed {seed}: {arm.about}", file=sys.stderr)
                made = start if not process.is_main_process else _start(arm, start, seed)
                train(arm_settings(settings, arm, _agreed(made, process), folder, seed))
                _remove(start, process)
            runs[arm.name].append(json.loads((folder / "training_report.json").read_text(encoding="utf-8")))
            if process.is_main_process:
                scores[arm.name].append(_score(settings, folder))
            process.wait_for_everyone()

    report: dict[str, Any] = {"settings": shareable(settings), "seeds": seeds}
    if process.is_main_process:
        report |= _summary(settings, arms, runs, scores)
        write_json(output / "report.json", report)
        (output / "report.md").write_text(to_markdown(report), encoding="utf-8")
        plot_curves(report, output / "curves.png")
    process.wait_for_everyone()
    return json.loads((output / "report.json").read_text(encoding="utf-8"))


def _claim(output: Path, settings: Settings, process: PartialState) -> None:
    """Take the output folder: a new one, or that of the same comparison, begun before."""
    tree = dataclasses.asdict(settings) | {"output": output.name, "overwrite": False}
    marker = output / MARKER
    if process.is_main_process:
        if marker.is_file():
            if json.loads(marker.read_text(encoding="utf-8")) != json.loads(json.dumps(tree)):
                raise UserError(
                    f"{output} holds another comparison, with other settings: name a new output, or delete the folder."
                )
        elif output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise UserError(f"{output} exists and holds no comparison; name a new output folder.")
        output.mkdir(parents=True, exist_ok=True)
        write_json(marker, tree)
    process.wait_for_everyone()


def _start(arm: Arm, folder: Path, seed: int) -> Path:
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    return arm.start(folder, seed)


def _agreed(start: Path, process: PartialState) -> Path:
    """The main process's answer, for all."""
    from accelerate.utils import broadcast_object_list

    answer = [str(start)]
    if process.num_processes > 1:
        broadcast_object_list(answer)
    return Path(answer[0])


def _remove(start: Path, process: PartialState) -> None:
    process.wait_for_everyone()
    if process.is_main_process:
        shutil.rmtree(start, ignore_errors=True)


def _file_name(name: str) -> str:
    return name.replace(", ", "-")


def _score(settings: Settings, folder: Path) -> DocumentScores:
    device = torch.device("cpu" if precision.on_cpu() else torch.accelerator.current_accelerator())
    _, held_out = load_rows(settings, load_tokenizer(folder))
    model = load_model(folder, torch.float32).to(device)
    return score_documents(model, held_out, settings.evaluation.rows_per_batch, device)


def _summary(
    settings: Settings, arms: list[Arm], runs: dict[str, list[dict[str, Any]]], scores: dict[str, list[DocumentScores]]
) -> dict[str, Any]:
    """What report.json holds, see `training.comparison_report`."""
    first = scores[arms[0].name][0]
    table = {}
    for arm in arms:
        of_arm, last = scores[arm.name], runs[arm.name][-1]
        nats = sum(float(s.nats.sum()) for s in of_arm) / len(of_arm)
        kinds = last["parameters"].values()
        table[arm.name] = {
            "about": arm.about,
            "parameters": sum(kind["trained"] + kind["frozen"] for kind in kinds),
            "trained": sum(kind["trained"] for kind in kinds),
            "frozen_patterns": arm.frozen,
            **likelihood(float(first.targets.sum()), nats, first.num_bytes),
            "nll_per_seed": [s.nll for s in of_arm],
            "perplexity_before": [run["perplexity_before"] for run in runs[arm.name]],
            "tokens": last["tokens"],
            "tokens_per_second": sum(run["tokens_per_second"] for run in runs[arm.name]) / len(of_arm),
            "precision": last["precision"],
            "warnings": sorted({warning for run in runs[arm.name] for warning in run["warnings"]}),
        }
    report = {
        "arms": table,
        "held_out": {"documents": int((first.targets > 0).sum()), "tokens": int(first.targets.sum())},
        "curves": {
            name: [
                {
                    "steps": [{key: step[key] for key in CURVE} for step in run["steps"]],
                    "evaluations": [{"step": e["step"], "nll": e["nll"]} for e in run["evaluations"]],
                }
                for run in of_arm
            ]
            for name, of_arm in runs.items()
        },
        "documents": {
            "targets": first.targets.tolist(),
            "nats": {name: [s.nats.tolist() for s in of_arm] for name, of_arm in scores.items()},
        },
    }
    plain = [arm.name for arm in arms if arm.name in (CONTROL, "standard", "standard+none")]
    return with_comparisons(report, scores, plain[0] if plain else None)
