"""The learning rate over a stage."""

import math
from typing import Literal


def factor(
    step: int,
    steps: int,
    warmup: float,
    min_lr_ratio: float,
    schedule: Literal["cosine", "constant", "wsd"] = "cosine",
    decay: float = 0.2,
) -> float:
    """What the peak learning rate is multiplied by at optimiser step `step` (from 0) of `steps`.

    It rises linearly over the share `warmup` of the steps, the first of which already moves, then follows half a
    cosine down to `min_lr_ratio` at the last step, or stays, or (wsd: warm-up, stable, decay; Hu et al. 2024,
    arXiv:2404.06395) stays until the last share `decay` of the steps, over which it falls to `min_lr_ratio` in a
    straight line.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule == "wsd":
        falling = min(math.ceil(decay * steps), steps - rising)
        fallen = max(0, step + 1 - (steps - falling)) / max(1, falling)
        return 1 - (1 - min_lr_ratio) * min(1.0, fallen)
    progress = min(1.0, (step - rising + 1) / max(1, steps - rising))
    return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
