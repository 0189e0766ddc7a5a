"""Retrofits: plain Llama checkpoints become Transformer2 checkpoints that compute the same, with a proof."""

from .inspection import inspect_checkpoint
from .retrofit import convert
from .verification import verify

__all__ = ["convert", "inspect_checkpoint", "verify"]
