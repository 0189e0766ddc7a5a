"""The original of a retrofit, without a second copy: the same network while its new operators are taken out."""

import contextlib
from collections.abc import Iterator

from torch import nn

from transformer2.conversion.new_parameters import NEW_MODULES
from transformer2.conversion.target_config import departs_from_identity
from transformer2.depth import Residual
from transformer2.errors import UserError


@contextlib.contextmanager
def bypassed(network: nn.Module) -> Iterator[None]:
    """Meanwhile every residual is the standard one, no local mixer is there, and adapters of PEFT are off.

    What is left computes what the pretrained model does, as long as its own parameters have not been trained.
    Dropout is off.
    """
    swaps = []
    for module in network.modules():
        for name, child in module._modules.items():
            if child is not None and (name in NEW_MODULES or name.endswith(("_residual", "_local_mixer"))):
                plain, inner = None, getattr(child, "original_module", child)  # PEFT wraps what it trains as a whole
                if isinstance(inner, Residual):
                    plain = Residual(network.config, inner.layer_idx, inner.site)
                swaps.append((module, name, child, plain))
    training = network.training
    adapted = [module for module in network.modules() if hasattr(module, "base_layer")]
    for module, name, _, plain in swaps:
        module._modules[name] = plain
    for module in adapted:
        module.enable_adapters(False)
    network.eval()
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapters(True)
        for module, name, child, _ in swaps:
            module._modules[name] = child
        network.train(training)


def check_has_original(network: nn.Module, train_pretrained: bool) -> None:
    """Raise UserError where the bypassed network is not the original: it is trained itself, or never was one."""
    if train_pretrained:
        raise UserError(
            "loss.kl compares with the original model, and optimisation.train=all changes it: train the new "
            "parameters alone (optimisation.train=new), or set loss.kl=0."
        )
    if getattr(network.config, "residual", None) and (why := departs_from_identity(network.config)):
        raise UserError(f"loss.kl needs a retrofit, whose original is in it; this model has {why}: set loss.kl=0.")
