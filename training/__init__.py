"""Fine-tuning, evaluating and trying out checkpoints: `doctor`, `train`, `merge`, `evaluate`,
`run_tasks`, `generate`."""

import importlib

_FUNCTIONS = {"train": "finetune", "evaluate": "evaluation", "generate": "generation"}
_FUNCTIONS |= {"doctor": "examination", "merge": "merging", "run_tasks": "harness"}

__all__ = ["doctor", "evaluate", "generate", "merge", "run_tasks", "train"]


def __getattr__(name: str):
    """The functions, imported when asked for, so that `python -m transformer2.training.finetune` works."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"transformer2.training.{_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
