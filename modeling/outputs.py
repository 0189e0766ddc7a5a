"""The library's output classes, with the weights of the depth reads."""

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


@dataclass
class Transformer2ModelOutput(BaseModelOutputWithPast):
    """depth_weights: with `output_depth_weights=True`, one tensor per depth read, in the order they were made."""

    depth_weights: tuple[Tensor, ...] | None = None


@dataclass
class Transformer2CausalLMOutput(CausalLMOutputWithPast):
    """depth_weights: with `output_depth_weights=True`, one tensor per depth read, in the order they were made."""

    depth_weights: tuple[Tensor, ...] | None = None
