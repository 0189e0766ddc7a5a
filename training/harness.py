"""Tasks of lm-evaluation-harness, in this process: nothing is reloaded, and no remote code is run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer2.conversion.paths import plain_os_errors
from transformer2.errors import MachineError, UserError
from transformer2.training.loading import default_device, find_checkpoint, load_model, load_tokenizer, loading_dtype


@plain_os_errors()
def run_tasks(
    model: str | Path,
    tasks: Sequence[str],
    *,
    against: str | Path | None = None,
    task_folder: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    apply_chat_template: bool = False,
) -> dict[str, Any]:
    """Evaluate a checkpoint, and the base beside it, on tasks of lm-evaluation-harness.

    tasks: names. against: the base, or another checkpoint. task_folder: with YAML files of tasks of your own. limit:
    examples per task. num_fewshot: examples in the prompt (default: the task's own).

    -> {"tasks": {task: {metric: value, "metric_stderr": value}}, "base": the same or None, "limit": ...}
    Raises MachineError without lm-eval, UserError for unknown tasks and bad values.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MachineError(
            f"Tasks take lm-evaluation-harness ({error}): pip install 'transformer2[harness]'."
        ) from None
    for name, value in (("limit", limit), ("batch size", batch_size)):
        if value is not None and value < 1:
            raise UserError(f"The {name} must be at least 1, got {value}.")
    if num_fewshot is not None and num_fewshot < 0:
        raise UserError(f"The number of examples in the prompt cannot be negative, got {num_fewshot}.")
    torch_dtype = loading_dtype(dtype)
    if task_folder is not None and not Path(task_folder).is_dir():
        raise UserError(f"There is no folder {task_folder} with tasks.")
    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    if not tasks:
        raise UserError("Name at least one task.")
    for task in tasks:
        if task not in manager.all_tasks:
            raise UserError(
                f"There is no task {task!r}; `lm-eval ls tasks` lists those of lm-evaluation-harness, and your own go "
                "into the folder of --task-folder."
            )
    device = default_device()
    folders = {"tasks": find_checkpoint(model), "base": None if against is None else find_checkpoint(against)}
    report: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "base": None}
    for kind, folder in folders.items():
        if folder is None:
            continue
        network = load_model(folder, torch_dtype).to(device).eval()
        wrapped = HFLM(pretrained=network, tokenizer=load_tokenizer(folder), batch_size=batch_size, backend="causal")
        try:
            found = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                apply_chat_template=apply_chat_template,
                bootstrap_iters=0,
                log_samples=False,
            )
        except (ConnectionError, OSError) as error:
            raise MachineError(
                f"The data of a task could not be read ({str(error).strip().splitlines()[0]}): it is downloaded the "
                "first time, so check the network, or point the task at local files."
            ) from error
        report[kind] = {task: _numbers(scores) for task, scores in found["results"].items()}
    return report


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    """{"acc,none": 0.5, "acc_stderr,none": "N/A", "alias": ...} -> {"acc": 0.5}"""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in key
    }
