"""The processes of a run: how they are started, seeded, and told how to compute."""

import contextlib
import os
from collections.abc import Iterator

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, set_seed

from transformer2.errors import UserError
from transformer2.training import precision
from transformer2.training.settings import OptimisationSettings
from transformer2.training.sharding import check_distribution, is_deepspeed


def start(optimisation: OptimisationSettings) -> tuple[Accelerator, str]:
    """The processes of this run, seeded, and the precision that they compute in ("bf16" or "fp32").

    Raises UserError where the processes cannot share the work evenly, or the launcher left some out, and MachineError
    where they would not share the model as was asked.
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
    check_distribution(accelerator)
    if optimisation.rows_per_step % accelerator.num_processes:
        raise UserError(
            f"optimisation.rows_per_step ({optimisation.rows_per_step}) must be a multiple of the number of processes "
            f"({accelerator.num_processes}), so that all of them do the same work."
        )
    if is_deepspeed(accelerator):  # which asks for it where no loader of batches is prepared
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = (
            optimisation.rows_per_batch
        )
    if not accelerator.is_main_process:
        transformers.utils.logging.disable_progress_bar()
    set_seed(optimisation.seed)
    return accelerator, chosen


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only algorithms that give the same bits every time, while this is entered."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, matrix products on a GPU are refused
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def enable_checkpointing(model) -> None:
    """Recompute layers in the backward pass; the reentrant kind would lose the gradient behind frozen embeddings."""
    if hasattr(model, "activation_checkpointing_enable"):  # the older name goes in transformers 6
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
