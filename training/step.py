"""One optimiser step and one evaluation, shared by all processes."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from transformer2.errors import CheckFailed
from transformer2.training.evaluation import likelihood, score
from transformer2.training.loss import batch_loss
from transformer2.training.packing import IGNORED, Row, Rows, collate
from transformer2.training.settings import LossSettings
from transformer2.training.sharding import is_sharding

MOST_SKIPPED = 10  # steps in a row; then no later one will be finite either
POLL = 16  # batches of an evaluation between two looks at whether to stop


def accumulate(
    accelerator: Accelerator,
    model,
    step_rows: list[Row],
    rows_per_batch: int,
    loss: LossSettings = LossSettings(),  # noqa: B008 (never changed)
) -> float:
    """Add the gradient of one optimiser step's mean loss to the parameters' gradients, and return that loss.

    step_rows: of all processes; each takes its share, in micro-batches of `rows_per_batch` rows.
    """
    targets = sum(row.num_targets for row in step_rows)
    mine = step_rows[accelerator.process_index :: accelerator.num_processes]
    total = torch.zeros((), device=accelerator.device)
    for begin in range(0, len(mine), rows_per_batch):
        last = begin + rows_per_batch >= len(mine)
        with nullcontext() if last else accelerator.no_sync(model):
            batch = collate(mine[begin : begin + rows_per_batch], accelerator.device)
            labels = batch.pop("labels")
            network = accelerator.unwrap_model(model)
            share = batch_loss(model, network, batch, labels, kl=loss.kl, temperature=loss.temperature) / targets
            accelerator.backward(share * accelerator.num_processes)  # gradients are averaged over the processes
            total += share.detach()
    return accelerator.reduce(total, reduction="sum").item()


def evaluate_held_out(
    accelerator: Accelerator, model, rows: Rows, size: int, stop: Callable[[], bool] = lambda: False, steps: int = 1
) -> dict[str, Any] | None:
    """{tokens, nll, perplexity, bits_per_byte} of the held-out rows, which the processes share, `size` at a time.

    steps: taken so far. None where `stop`, which all processes answer alike, has said so on the way.
    """
    mine = list(range(accelerator.process_index, len(rows), accelerator.num_processes))
    longest = math.ceil(math.ceil(len(rows) / accelerator.num_processes) / size)  # batches, of any process
    stopped = False

    def batches() -> Iterator[list[Row]]:
        nonlocal stopped
        for number in range(longest):
            if number % POLL == 0 and stop():
                stopped = True
                return
            batch = [rows[i] for i in mine[number * size : (number + 1) * size]]
            if batch:
                yield batch
            elif is_sharding(accelerator):  # every process has to take part in every forward pass
                row = rows[0]
                yield [Row(row.input_ids, row.position_ids, np.full_like(row.labels, IGNORED), row.num_bytes)]

    sums = score(accelerator.unwrap_model(model), batches(), device=accelerator.device)
    if stopped:
        return None
    targets, nats, num_bytes, *_ = accelerator.reduce(sums, reduction="sum").tolist()
    if not math.isfinite(nats) and steps == 0:
        raise CheckFailed(
            "Before any training, the model's loss on the held-out text is not finite, so nothing was written: look "
            "for NaN in its weights, or try optimisation.precision=fp32."
        )
    if not math.isfinite(nats):
        raise CheckFailed(
            "The loss on the held-out text is not finite, so nothing was written: lower the learning rates, or try "
            "optimisation.precision=fp32."
        )
    return {"tokens": int(targets), **likelihood(targets, nats, num_bytes)}


def save_bad_rows(file: Path, step_rows: list[Row]) -> None:
    """Write the rows of a step whose loss or gradient was not finite, so that somebody can look at them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(collate(step_rows), file)


def check_finite(loss: float, norm: float, step: int, file: Path, skipped: list[int] | None) -> bool:
    """Whether the step may be taken. skipped: earlier steps that were not, or None: a bad step ends the run.

    Raises CheckFailed where the run has to end.
    """
    bad = [(name, value) for name, value in (("loss", loss), ("gradient norm", norm)) if not math.isfinite(value)]
    if not bad:
        return True
    name, value = bad[0]
    remedy = f"lower the learning rates, or try optimisation.precision=fp32. The rows of the step are in {file}."
    if skipped is None:
        raise CheckFailed(
            f"The {name} is {value} at step {step}, so training stopped and nothing was written: {remedy}"
        )
    if skipped[-MOST_SKIPPED + 1 :] == list(range(step - MOST_SKIPPED + 1, step)):
        raise CheckFailed(f"The {name} was not finite in {MOST_SKIPPED} steps in a row, up to step {step}: {remedy}")
    return False
