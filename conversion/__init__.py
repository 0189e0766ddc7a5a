"""Retrofits: plain Llama checkpoints become Transformer2 checkpoints that compute the same, with a proof."""

from transformer2.conversion.inspection import inspect_checkpoint
from transformer2.conversion.planning import plan
from transformer2.conversion.results import Conversion, Plan, Stripped, Verification
from transformer2.conversion.retrofit import convert
from transformer2.conversion.stripping import strip
from transformer2.conversion.verification import verify

__all__ = [
    "Conversion",
    "Plan",
    "Stripped",
    "Verification",
    "convert",
    "inspect_checkpoint",
    "plan",
    "strip",
    "verify",
]
