"""The learning rate over a run."""

import math
from typing import Literal


def factor(
    step: int, steps: int, warmup: float, min_lr_ratio: float, schedule: Literal["cosine", "constant"] = "cosine"
) -> float:
    """What the peak learning rate is multiplied by at optimiser step `step` (from 0) of `steps`.

    It rises linearly over the share `warmup` of the steps, the first of which already moves, then follows half a
    cosine down to `min_lr_ratio` at the last step, or stays.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - rising + 1) / max(1, steps - rising))
    return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
