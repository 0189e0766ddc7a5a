"""Losses over packed rows: sums over target tokens, so that whoever has the total can weight every token alike."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of a token that is no target


def target_nats(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, T, V], labels [B, T] (not shifted) -> -log p of tokens 1 to T - 1 in nats, 0 where no target."""
    logits = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
