"""Reads golden vectors: tensors that other people's implementations computed."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

GOLDEN = Path(__file__).parent / "golden"
FOLDER = GOLDEN / "depth"
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-5, 1e-4


def cases(name: str, kind: str | None = None, folder: Path = FOLDER) -> list[Any]:
    """The cases of a file, as parameters of a test."""
    import pytest

    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        listed = json.loads(file.metadata()["config"])["cases"]
    return [
        pytest.param(Golden(name, case), id=case["case"]) for case in listed if kind in (None, case.get("kind", kind))
    ]


class Golden:
    """One case: sizes as attributes, inputs and parameters as leaves, and what came out of the reference."""

    def __init__(self, file: str, case: dict[str, Any]):
        self.file = file
        self.__dict__.update(case)

    def load(self, folder: Path = FOLDER) -> "Golden":
        with safe_open(folder / f"{self.file}.safetensors", "pt") as file:
            prefix = f"{self.case}/"
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            tensors = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        self.leaves, self.out, self.probe, self.grad = {}, {}, {}, {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind in ("in", "param"):
                self.leaves[rest] = tensor.clone().requires_grad_()
            else:
                getattr(self, kind)[rest] = tensor
        self.out.pop("J", None)
        assert self.out
        return self

    def __getitem__(self, name: str) -> Tensor:
        return self.leaves[name]

    def check(self, ours: dict[str, Tensor]) -> None:
        """Our outputs, and the gradients of the same objective, are the reference's."""
        assert set(ours) == set(self.out), set(ours) ^ set(self.out)
        assert self.probe
        for name, expected in self.out.items():
            close(ours[name], expected, OUTPUT_LIMIT, name)
        sum((ours[name] * weights).sum() for name, weights in self.probe.items()).backward()
        assert self.grad
        for name, expected in self.grad.items():
            close(self.leaves[name].grad, expected, GRADIENT_LIMIT, f"gradient of {name}")


def close(ours: Tensor, expected: Tensor, limit: float, name: str) -> None:
    assert ours.shape == expected.shape, (name, ours.shape, expected.shape)
    error = ((ours - expected).abs() / (1 + expected.abs())).max().item()
    assert error <= limit, f"{name}: {error:.1e} > {limit:.0e}"


def assign(module: nn.Module, **tensors: Tensor) -> None:
    """Put tensors, leaves or functions of leaves, in the place of parameters."""
    for name, tensor in tensors.items():
        assert name in module._parameters, name
        if module._parameters[name] is not None:
            assert module._parameters[name].shape == tensor.shape, (name, module._parameters[name].shape, tensor.shape)
        del module._parameters[name]
        setattr(module, name, tensor)


def rms_norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
