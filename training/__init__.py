"""Fine-tuning, evaluating and trying out checkpoints: `train`, `evaluate`, `generate`."""

import importlib

_FUNCTIONS = {"train": "finetune", "evaluate": "evaluation", "generate": "generation"}

__all__ = ["evaluate", "generate", "train"]


def __getattr__(name: str):
    """The three functions, imported when asked for, so that `python -m transformer2.training.finetune` works."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"transformer2.training.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
