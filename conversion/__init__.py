"""Retrofits: plain Llama checkpoints become Transformer2 checkpoints that compute the same, with a proof."""

from transformer2.conversion.inspection import inspect_checkpoint
from transformer2.conversion.plan import plan
from transformer2.conversion.retrofit import convert
from transformer2.conversion.verification import verify

__all__ = ["convert", "inspect_checkpoint", "plan", "verify"]
