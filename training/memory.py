"""How much memory a training step needs, without having it: the model is run with tensors that hold no numbers."""

import copy

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from transformer2.training.loss import LOGITS_AT_ONCE
from transformer2.training.parameters import named_parameters
from transformer2.training.settings import OptimisationSettings

FLOAT = 4  # bytes


def estimate(model: nn.Module, optimisation: OptimisationSettings, length: int, precision: str) -> dict[str, int]:
    """Bytes that one process needs which shares nothing with others, by what they are for, and their sum, "total".

    model: on the device "meta", in the types that it is trained in, with `requires_grad` as it will be.
    weights; gradients and AdamW's two moments, in float32; activations, the tensors that one micro-batch of rows of
    `length` tokens keeps for the backward pass, bfloat16 copies of weights among them; logits, of those targets whose
    loss is computed at a time. What libraries and fragmentation take is not in it.
    """
    sizes = [(parameter, parameter.numel()) for _, parameter in named_parameters(model)]
    trained = sum(size for parameter, size in sizes if parameter.requires_grad)
    rows, vocabulary = optimisation.rows_per_batch, model.get_output_embeddings().weight.shape[0]
    positions = min(rows * length, max(1, LOGITS_AT_ONCE // vocabulary))
    needed = {
        "weights": sum(size * parameter.element_size() for parameter, size in sizes),
        "gradients": FLOAT * trained,
        "optimizer": 2 * FLOAT * trained,
        "activations": activations(model, rows, length, precision, optimisation.gradient_checkpointing),
        "logits": 3 * FLOAT * positions * vocabulary,  # themselves, their softmax and their gradient
    }
    return {**needed, "total": sum(needed.values())}


def activations(model: nn.Module, rows: int, length: int, precision: str, checkpointing: bool) -> int:
    """Bytes kept between forward and backward pass; with checkpointing the inputs of all layers and one layer's own.

    Up to about a tenth too much for small rows, where the real pass does without a mask; twice too much for Canon.
    """
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    inputs: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    def note(module: nn.Module, arguments: tuple) -> None:
        for value in arguments:
            if isinstance(value, torch.Tensor):
                inputs[value.untyped_storage()._cdata] = value.untyped_storage()

    # Not on "meta" itself, where autocast does nothing, and whoever looks at a number fails.
    base = copy.deepcopy(model.base_model)
    with FakeTensorMode():
        _put_on_cpu(base)
        own = {parameter.untyped_storage()._cdata for parameter in base.parameters()}
        for layer in base.layers:
            layer.register_forward_pre_hook(note)
        ids = torch.zeros(rows, length, dtype=torch.long)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
        with saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            base(input_ids=ids, use_cache=False)
    everything = sum(storage.nbytes() for storage in kept.values())
    if not checkpointing:
        return everything
    return sum(storage.nbytes() for storage in inputs.values()) + everything // len(base.layers)


def _put_on_cpu(model: nn.Module) -> None:
    """Give the model parameters and buffers that look as if they were on the CPU."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def available(device: torch.device) -> int:
    """Bytes that are free on the device, or in the machine's memory where it computes on its CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available
