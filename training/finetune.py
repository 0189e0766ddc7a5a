"""Fine-tuning a checkpoint on text: one loop, from a settings file to a normal checkpoint folder.

    transformer2 train CONFIG.yaml [section.key=value ...]
    accelerate launch -m transformer2.training.finetune CONFIG.yaml [section.key=value ...]
    torchrun --nproc_per_node 2 -m transformer2.training.finetune CONFIG.yaml ...      (several processes on a CPU)

The loss of an optimiser step is the sum over its target tokens divided by their number, once, over all
micro-batches and processes: how a step is cut up changes nothing.
"""

import contextlib
import dataclasses
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch.optim.lr_scheduler import LambdaLR

from transformer2.conversion.files import write_json
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.conversion.publishing import PartialFolder, partial_folder, publish
from transformer2.conversion.trained import trained_everything, training_report
from transformer2.errors import CheckFailed, UserError
from transformer2.training import diagnosis, parameters, precision, schedule
from transformer2.training.arms import is_comparison
from transformer2.training.evaluation import likelihood, score, token_losses
from transformer2.training.isolation import check_isolation
from transformer2.training.loading import find_checkpoint, load_model, load_tokenizer, stored_dtypes
from transformer2.training.packing import Row, Rows, collate
from transformer2.training.progress import Progress
from transformer2.training.rows import load_rows
from transformer2.training.saving import check_frozen, check_output, write_checkpoint
from transformer2.training.settings import OptimisationSettings, Settings, check, load_settings


@plain_os_errors()
def train(config: Settings | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Run the training that `config` describes (settings, a mapping of their shape, or a YAML file).

    Writes the checkpoint folder `output` and returns its training_report.json: loss, gradient norm and learning rates
    of every step, held-out perplexity, tokens, seconds, tokens per second, parameters, warnings.
    Settings that ask for a control run, nulls, variants, seeds or random weights give a comparison, see
    `training.comparison`.
    Raises UserError for bad input, CheckFailed where a loss or gradient is not finite or a frozen tensor changed; then
    nothing is written.
    """
    settings = config if isinstance(config, Settings) else load_settings(config)
    check(settings)
    if is_comparison(settings):
        from transformer2.training.comparison import compare

        return compare(settings)
    source, output = find_checkpoint(settings.model), Path(os.path.abspath(user_path(settings.output)))
    check_output(output, source, settings.overwrite)
    accelerator, chosen = start(settings.optimisation)
    if not accelerator.is_main_process:
        return run(settings, accelerator, chosen, source, output, None)
    with plain_os_errors(output.parent), partial_folder(output, overwrite=settings.overwrite) as partial:
        return run(settings, accelerator, chosen, source, output, partial)


def run(
    settings: Settings,
    accelerator: Accelerator,
    chosen: str,
    source: Path,
    output: Path,
    partial: PartialFolder | None,
) -> dict[str, Any]:
    """The run itself, in the precision `chosen`. The main process builds `output` in `partial`, the others have none.

    `partial` is there before the first step, so that no other run takes the name while this one computes.
    """
    optimisation, dtypes = settings.optimisation, stored_dtypes(source)
    tokenizer = load_tokenizer(source)
    with accelerator.main_process_first():  # the others find what it has downloaded or converted
        rows, held_out = load_rows(settings, tokenizer)

    model = load_model(source, precision.load_dtype(chosen, optimisation.train, set(dtypes.values())))
    rows.check_vocabulary(model.config.vocab_size)
    parameters.select(model, optimisation.train, optimisation.frozen)
    precision.make_masters(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counts = parameters.count_parameters(model)
    if optimisation.gradient_checkpointing:
        enable_checkpointing(model)
    model.train()

    groups = parameters.parameter_groups(model, dataclasses.asdict(optimisation.lr), optimisation.weight_decay)
    accelerator.print(parameters.table(model, groups), file=sys.stderr)
    optimizer = torch.optim.AdamW(groups, betas=tuple(optimisation.betas))
    scheduler = LambdaLR(optimizer, learning_rate_factor(optimisation))  # not prepared: it would step once per process
    model, optimizer = accelerator.prepare(model, optimizer)
    check_isolation(accelerator.unwrap_model(model), rows.sample(), accelerator.device)

    history, evaluations = [], []
    num_tokens, seconds = 0, 0.0  # seconds of training alone
    if held_out is not None:
        evaluations.append({"step": 0, **evaluate_held_out(accelerator, model, held_out, settings)})
    with Progress(optimisation.steps, shown=accelerator.is_main_process) as progress:
        for step in range(1, optimisation.steps + 1):
            began = time.perf_counter()
            learning_rates = {group["kind"]: group["lr"] for group in optimizer.param_groups}
            step_rows = rows.for_step(step - 1, optimisation.rows_per_step, optimisation.seed)
            loss = accumulate(accelerator, model, step_rows, optimisation.rows_per_batch)
            norm = accelerator.clip_grad_norm_(trained, optimisation.clip or math.inf).item()
            check_finite(loss, norm, step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)

            seconds += time.perf_counter() - began
            num_tokens += sum(len(row.input_ids) for row in step_rows)
            history.append({"step": step, "loss": loss, "gradient_norm": norm, "learning_rates": learning_rates})
            progress.step(loss, num_tokens / seconds)
            every = settings.evaluation.every or optimisation.steps
            if held_out is not None and (step == optimisation.steps or step % every == 0):
                evaluations.append({"step": step, **evaluate_held_out(accelerator, model, held_out, settings)})
                progress.say(f"step {step}: held-out perplexity {evaluations[-1]['perplexity']:.3f}")

    report = {
        "settings": shareable(settings),
        "precision": chosen,
        "processes": accelerator.num_processes,
        "parameters": counts,
        "pretrained_changed": optimisation.train == "all" or trained_everything(training_report(source) or {}),
        "rows": rows.count,
        "tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "perplexity_before": evaluations[0]["perplexity"] if evaluations else None,
        "perplexity_after": evaluations[-1]["perplexity"] if evaluations else None,
        "evaluations": evaluations,
        "warnings": diagnosis.warnings(optimisation, accelerator.unwrap_model(model).config, evaluations, history),
        "steps": history,
    }
    if partial is not None:
        write_checkpoint(accelerator.unwrap_model(model, keep_fp32_wrapper=False), partial.path, source, dtypes)
        if settings.data.chat_template:
            (partial.path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
        check_frozen(partial.path, source, frozen)
        write_json(partial.path / "training_report.json", report)
        publish(partial, output)
    accelerator.wait_for_everyone()
    return report


def start(optimisation: OptimisationSettings) -> tuple[Accelerator, str]:
    """The processes of this run, seeded, and the precision that they compute in ("bf16" or "fp32").

    Raises UserError where the processes cannot share the work evenly, or the launcher left some out.
    """
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    several = "MASTER_ADDR" in os.environ and "ACCELERATE_USE_CPU" in os.environ
    if several and not any(rank in os.environ for rank in ranks):
        raise UserError(
            "On a CPU, `accelerate launch` starts only one of the processes asked for (it needs MPI for more): use "
            "`torchrun --nproc_per_node N -m transformer2.training.finetune ...` instead."
        )
    chosen = precision.choose(optimisation.precision)
    AcceleratorState._reset_state()  # an earlier run of this Python process may have had another precision
    accelerator = Accelerator(
        cpu=precision.on_cpu(),  # or several processes on a CPU would not know of each other
        mixed_precision="bf16" if chosen == "bf16" else "no",
        # We accumulate ourselves; without this, an environment variable of the launcher would scale our loss.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    if optimisation.rows_per_step % accelerator.num_processes:
        raise UserError(
            f"optimisation.rows_per_step ({optimisation.rows_per_step}) must be a multiple of the number of processes "
            f"({accelerator.num_processes}), so that all of them do the same work."
        )
    if not accelerator.is_main_process:
        transformers.utils.logging.disable_progress_bar()
    set_seed(optimisation.seed)
    return accelerator, chosen


def enable_checkpointing(model) -> None:
    """Recompute layers in the backward pass; the reentrant kind would lose the gradient behind frozen embeddings."""
    if hasattr(model, "activation_checkpointing_enable"):  # the older name goes in transformers 6
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def learning_rate_factor(optimisation: OptimisationSettings):
    """step -> what the peak learning rates are multiplied by."""
    return lambda step: schedule.factor(
        step, optimisation.steps, optimisation.warmup, optimisation.min_lr_ratio, optimisation.schedule
    )


def accumulate(accelerator: Accelerator, model, step_rows: list[Row], rows_per_batch: int) -> float:
    """Add the gradient of one optimiser step's mean loss to the parameters' gradients, and return that loss.

    step_rows: of all processes; each takes its share, in micro-batches of `rows_per_batch` rows.
    """
    targets = sum(row.num_targets for row in step_rows)
    mine = step_rows[accelerator.process_index :: accelerator.num_processes]
    total = torch.zeros((), device=accelerator.device)
    for begin in range(0, len(mine), rows_per_batch):
        last = begin + rows_per_batch >= len(mine)
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            batch = collate(mine[begin : begin + rows_per_batch], accelerator.device)
            labels = batch.pop("labels")
            share = token_losses(model(**batch, use_cache=False).logits, labels) / targets
            accelerator.backward(share * accelerator.num_processes)  # gradients are averaged over the processes
            total += share.detach()
    return accelerator.reduce(total, reduction="sum").item()


def evaluate_held_out(accelerator: Accelerator, model, rows: Rows, settings: Settings) -> dict[str, Any]:
    """{tokens, nll, perplexity, bits_per_byte} of the held-out rows, which the processes share."""
    mine = range(accelerator.process_index, len(rows), accelerator.num_processes)
    size = settings.evaluation.rows_per_batch
    batches = ([rows[i] for i in mine[begin : begin + size]] for begin in range(0, len(mine), size))
    sums = score(accelerator.unwrap_model(model), batches, device=accelerator.device)
    targets, nats, num_bytes, *_ = accelerator.reduce(sums, reduction="sum").tolist()
    if not math.isfinite(nats):
        raise CheckFailed(
            "The loss on the held-out text is not finite, so nothing was written: lower the learning rates, or try "
            "optimisation.precision=fp32."
        )
    return {"tokens": int(targets), **likelihood(targets, nats, num_bytes)}


def check_finite(loss: float, norm: float, step: int) -> None:
    """Raise CheckFailed for a loss or gradient norm that is not a finite number: every later step would be wasted."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            raise CheckFailed(
                f"The {name} is {value} at step {step}, so training stopped and nothing was written: lower the "
                "learning rates, or try optimisation.precision=fp32."
            )


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
    tree["data"]["train"], tree["data"]["eval"] = last_part(settings.data.train), last_part(settings.data.eval)
    return tree


if __name__ == "__main__":  # the same command line as `transformer2 train`, for `accelerate launch -m`
    from transformer2_cli import main

    sys.argv.insert(1, "train")
    main()
