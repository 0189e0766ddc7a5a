"""Canon layers: short convolutions with a residual, at up to four places of a layer.

Source: Allen-Zhu, Physics of Language Models: Part 4.1 (arXiv 2512.17351), section 3, and its code (PhysicsLM4).

    y = x + act(conv(x))        no bias, no activation, kernel 4

    A  the normalised input of attention         B  queries, keys and values together, before RoPE
    C  the normalised input of the MLP           D  the MLP's gate and up projections together
"""

from typing import Any, Literal

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .convolution import ShortConvolution
from .sequence import LocalMixer, Place, width_of
from .sequence_short_conv import check_kernel

PLACES: dict[str, Place] = {"A": "attn", "B": "qkv", "C": "mlp", "D": "gate_up"}


class Canon(LocalMixer):
    """Canon layers (arXiv 2512.17351): convolutions with a residual, inside attention and the MLP.

    form: "paper" (uniform kernels) or "identity" (zero kernels, for pretrained models).
    letters: where, any of A (attention's input), B (queries, keys, values), C (the MLP's input), D (gate and up).
    kernel_size: tokens that a token sees, itself included; the paper uses 4.
    activation: "silu" or null, of the convolution.
    bias: of the convolution.
    skip: the residual around each convolution.
    """

    def __init__(
        self,
        config,
        layer_idx: int,
        place: Place,
        *,
        form: Literal["paper", "identity"] = "paper",
        letters: str = "ABCD",
        kernel_size: int = 4,
        activation: Literal["silu"] | None = None,
        bias: bool = False,
        skip: bool = True,
    ):
        super().__init__(config, layer_idx, place)
        self.replaces_input = not skip
        self.conv = ShortConvolution(width_of(config, place), kernel_size, bias, layer_idx, zero=form == "identity")
        self.activation = nn.Identity() if activation is None else ACT2FN[activation]

    @classmethod
    def check(cls, config, **options: Any) -> None:
        check_kernel("Canon", options["kernel_size"])
        letters = options["letters"]
        if not letters or not set(letters) <= set(PLACES) or len(set(letters)) < len(letters):
            raise ValueError(f"Canon's letters are A, B, C and D, each at most once, such as ABCD, got {letters!r}.")
        if options["form"] == "identity" and not options["skip"]:
            raise ValueError("Without skip a zero kernel is no identity: Canon's identity form needs skip=true.")

    @classmethod
    def places(cls, config, **options: Any) -> tuple[Place, ...]:
        return tuple(PLACES[letter] for letter in sorted(options["letters"]))

    def forward(self, x: Tensor, **tokens: Any) -> Tensor:
        return self.activation(self.conv(x, **tokens))
