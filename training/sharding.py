"""What a launcher asked for, and whether it is really so.

Accelerate falls back to plain data parallelism without a word where it cannot shard, on a CPU for example: a model
that should have been cut up is then in every process's memory.
"""

from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env
from torch import nn

from transformer2.errors import MachineError, UserError
from transformer2.training.state import is_sharded

ASKED = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}  # set by `accelerate launch`


def check_distribution(accelerator: Accelerator) -> None:
    """Raise MachineError where sharding was asked for and Accelerate does something else, UserError for FSDP 1."""
    for kind, variable in ASKED.items():
        if parse_flag_from_env(variable) and accelerator.distributed_type != DistributedType[kind]:
            raise MachineError(
                f"The launcher was asked for {kind}, and Accelerate uses {accelerator.distributed_type.value}, "
                "which shards nothing: run on GPUs, or choose another configuration (configs/accelerate)."
            )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP 1 is not supported: set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does.")


def check_sharded(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise MachineError where, after `prepare`, parameters are not cut up although they should be."""
    if accelerator.num_processes == 1:
        return
    whole = []
    if accelerator.distributed_type == DistributedType.FSDP:
        whole = [name for name, parameter in model.named_parameters() if not is_sharded(parameter)]
    elif _zero_stage(accelerator) == 3:
        whole = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_id")]
    if whole:
        raise MachineError(
            f"Sharding was asked for, but {len(whole)} parameters are whole in every process, such as {whole[0]}: "
            "check the wrapping policy of the Accelerate configuration."
        )


def is_sharding(accelerator: Accelerator) -> bool:
    """Whether processes hold parts of the model only."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def is_deepspeed(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed owns the optimiser."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def _zero_stage(accelerator: Accelerator) -> int | None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage
