"""How much a model computes per token, its residuals and local mixers included, and how well a device is used."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from transformer2.training.packing import Rows, collate

# Peak of dense bf16 matrix products in TFLOP/s, from the makers' data sheets; the first name that matches counts.
PEAKS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI300X": 1307.4,
}


def _attention(query, key, value, *arguments, out_shape=None, **keywords) -> int:
    return sdpa_flop_count(query, key, value)


# The counter knows the attention kernels of GPUs, and takes that of CPUs for free.
UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def flops_per_token(model: nn.Module, rows: Rows, device: torch.device) -> float:
    """Floating-point operations of training on one token, averaged over the first row.

    The products of the forward pass are counted as they run, attention and new operators among them; element-wise work
    is not. The backward pass costs as much again for the gradients of activations, and as much times the trained share
    of the parameters for those of weights. Recomputing (gradient checkpointing) is not counted: it is not the model's.
    """
    batch = collate([rows[0]], device)
    tokens = batch.pop("labels").numel()
    training = model.training
    model.eval()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        model(**batch, use_cache=False)
    model.train(training)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    share = sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)
    return counter.get_total_flops() / tokens * (2 + share)


def peak_flops(accelerator: Accelerator, given: float | None) -> float | None:
    """Of one device, per second; given: in TFLOP/s. None where it is not known."""
    if given is not None:
        return given * 1e12
    if accelerator.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(accelerator.device)
    return next((peak * 1e12 for known, peak in PEAKS.items() if known in name), None)


def utilisation(flops_per_second: float, peak: float | None, devices: int) -> float | None:
    """MFU: the share of the devices' peak that the model's own operations take (Chowdhery et al. 2022, appendix B)."""
    return None if peak is None else flops_per_second / (peak * devices)
