"""ShortConv: a causal depthwise convolution over the last few tokens.

Sources: Poli et al., Hyena (arXiv 2302.10866); Gu and Dao, Mamba (arXiv 2312.00752); the slot: Residual Stream Duality
(arXiv 2603.16039), section 2.4. The gated form is the block of LFM2 (Liquid AI, arXiv 2511.23404):

    plain:    act(conv(x))                  gated:    W_out (C * conv(B * x')),  (B, C, x') = W_in x
"""

from typing import Any, Literal

from torch import Tensor, nn
from transformers.activations import ACT2FN

from .convolution import ShortConvolution
from .layers import ZeroLinear
from .sequence import LocalMixer, Place, width_of


class ShortConv(LocalMixer):
    """ShortConv (arXiv 2302.10866): a causal depthwise convolution of the last few tokens.

    form: "paper" (random kernel) or "identity" (zero kernel or zero output projection, for pretrained models).
    site: "layer", a sublayer with its own norm; or added to the normalised input of attention ("attn") or the MLP
        ("mlp"), to queries, keys and values ("qkv"), or to the embeddings ("embedding").
    kernel_size: tokens that a token sees, itself included.
    activation: "silu" or null.
    bias: of the convolution.
    gated: the LFM2 block, with projections around the convolution and two gates; takes no activation.
    """

    dormant = (r"\.local_layernorm\.", r"\.input_projection\.", r"\.gated_conv\.")

    def __init__(
        self,
        config,
        layer_idx: int,
        place: Place,
        *,
        form: Literal["paper", "identity"] = "paper",
        site: Literal["layer", "attn", "mlp", "qkv", "embedding"] = "layer",
        kernel_size: int = 4,
        activation: Literal["silu"] | None = "silu",
        bias: bool = False,
        gated: bool = False,
    ):
        super().__init__(config, layer_idx, place)
        width = width_of(config, place)
        self.activation = ACT2FN[activation] if activation and not gated else nn.Identity()
        zero = form == "identity"
        if gated:
            self.input_projection = nn.Linear(width, 3 * width, bias=False)
            self.gated_conv = ShortConvolution(width, kernel_size, bias, layer_idx, zero=False)
            self.output_projection = (ZeroLinear if zero else nn.Linear)(width, width, bias=False)
        else:
            self.conv = ShortConvolution(width, kernel_size, bias, layer_idx, zero)
        self.gated = gated

    @classmethod
    def check(cls, config, **options: Any) -> None:
        check_kernel("ShortConv", options["kernel_size"])

    @classmethod
    def places(cls, config, **options: Any) -> tuple[Place, ...]:
        return (options["site"],)

    def forward(self, x: Tensor, **tokens: Any) -> Tensor:
        if not self.gated:
            return self.activation(self.conv(x, **tokens))
        gate_in, gate_out, value = self.input_projection(x).chunk(3, dim=-1)
        return self.output_projection(gate_out * self.gated_conv(gate_in * value, **tokens))


def check_kernel(name: str, kernel_size: int) -> None:
    """Raise ValueError for a kernel that is no mixing, or absurd."""
    if not 2 <= kernel_size <= 1024:
        raise ValueError(
            f"{name}'s kernel counts the token itself: kernel_size must lie between 2 and 1,024, got {kernel_size}; "
            '4 is usual, and local_mixer="none" means no local mixing.'
        )
