"""The state of a run, by the names of parameters: what a checkpoint holds, and what is carried from stage to stage.

Positions in an optimiser mean nothing once other parameters are trained; names always do. Sharded parameters are
gathered before they are saved and cut up after they are loaded, so that any number of processes can go on.
"""

import dataclasses
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from transformer2.errors import CheckFailed, UserError
from transformer2.training.parameters import named_parameters

Tensors = dict[str, Tensor]


@dataclass
class Counters:
    """Where a run is. Everything that decides what happens next is here, in the tensors, or in the settings.

    step: optimiser steps done, of all stages; it decides which rows come next. stage, stage_step: the stage and the
    steps done in it. tokens, seconds, flops: of training so far. skipped: steps that were not taken
    (on_nan). best: {step, nll} of the best evaluation. stage_best, no_gain: the best NLL of the stage, and how many
    evaluations ago. ended: the stage was ended early. annealed: value of each annealed parameter when its
    stage began, None before that. trained: every parameter that a stage has trained or annealed so far.
    """

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    skipped: list[int] = field(default_factory=list)
    best: dict[str, Any] | None = None
    stage_best: float | None = None
    no_gain: int = 0
    ended: bool = False
    annealed: dict[str, float] | None = None
    trained: list[str] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def model_tensors(model: nn.Module, names: Iterable[str]) -> Tensors:
    """The whole parameters of these names, on the CPU. All processes must call it, with the same names."""
    parameters, names = dict(named_parameters(model)), set(names)
    return {name: _whole(parameters[name]) for name in sorted(names)}


def load_model_tensors(model: nn.Module, tensors: Tensors) -> None:
    """Put saved parameters into a model that is not sharded yet.

    Raises UserError where names or shapes do not fit.
    """
    parameters = dict(named_parameters(model))
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise UserError(
                f"The checkpoint is of another model: {name} does not fit. Set resume=false to start anew."
            )
        with torch.no_grad():
            parameters[name].data = tensor.to(parameters[name].device, copy=True)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The state of an optimiser whose groups have `param_names`: {"NAME/exp_avg": tensor, ...}, whole, on the CPU."""
    return {
        f"{name}/{key}": _whole(value)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Give each parameter of the optimiser the state that was saved under its name, where there is one."""
    states: dict[str, Tensors] = {}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("/")
        states.setdefault(name, {})[key] = tensor
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if name in states:
                optimizer.state[parameter] = {
                    key: _placed_like(parameter, tensor) for key, tensor in states[name].items()
                }


def random_state() -> dict[str, Any]:
    """Of the generators of this process, as JSON can hold it."""
    version, words, place = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": [version, list(words), place],
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Raises CheckFailed for a state that is not one of `random_state`, or of another kind of machine."""
    try:
        version, words, place = state["python"]
        random.setstate((version, tuple(words), place))
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        torch.set_rng_state(_byte_tensor(state["torch"]))
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckFailed(
            f"The state of the random numbers cannot be restored ({type(error).__name__}: {error}), so the run would "
            "not go on as it was: resume on the kind of machine that it began on, or set resume=false."
        ) from error


def save(folder: Path, counters: Counters, tensors: Tensors, optimizer: Tensors, generators: list[dict], about: dict):
    """Write the files of a checkpoint; generators: one per process; about: what must agree on resuming."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in optimizer.items()}, folder / "optimizer.safetensors")
    (folder / "random.json").write_text(json.dumps(generators), encoding="utf-8")
    state = {"about": about, "counters": dataclasses.asdict(counters)}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")


def load_counters(checkpoint: Path) -> tuple[Counters, dict[str, Any]]:
    """-> where the run was, and what it was (`about`)."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    known = {item.name for item in dataclasses.fields(Counters)}
    if set(state["counters"]) != known:
        raise UserError(
            f"The checkpoint {checkpoint.name} was written by another version of this package: resume with that, or "
            "set resume=false to start anew."
        )
    return Counters(**state["counters"]), state["about"]


def load_tensors(checkpoint: Path) -> tuple[Tensors, Tensors, list[dict[str, Any]]]:
    """-> parameters, state of the optimiser, and generators of every process."""
    generators = json.loads((checkpoint / "random.json").read_text(encoding="utf-8"))
    return load_file(checkpoint / "model.safetensors"), load_file(checkpoint / "optimizer.safetensors"), generators


def is_sharded(tensor: Any) -> bool:
    """Whether this process holds a part of the tensor only (FSDP2)."""
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if is_sharded(tensor):
        tensor = tensor.full_tensor()  # all processes take part
    return tensor.to("cpu", copy=True)


def _placed_like(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
    """On the parameter's device, cut up as the parameter is. AdamW keeps its step counts, scalars, on the CPU."""
    if tensor.dim() == 0 and parameter.dim() != 0:
        return tensor.clone()
    if tensor.shape == parameter.shape and is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device if tensor.dim() else "cpu", copy=True)


def _byte_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
