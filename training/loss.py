"""Losses over packed rows: sums over target tokens, so that whoever has the total can weight every token alike.

The logits of a long row over a large vocabulary would be the largest tensor of a training step by far. They are never
made as a whole: the head is called on a few positions at a time, the targets only, and once more for the gradient.
This happens in place of the head's `forward`, inside that of the model, so that wrappers that gather or convert
parameters (DDP, FSDP, autocast, PEFT) see an ordinary call.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from transformer2.training.bypass import bypassed

IGNORED = -100  # the label of a token that is no target
LOGITS_AT_ONCE = 2**25  # 128 MiB in float32


def target_nats(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [B, T, V], labels [B, T] (not shifted) -> -log p of tokens 1 to T - 1 in nats, 0 where no target."""
    logits = _precise(logits[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")


def batch_loss(
    model: nn.Module,
    network: nn.Module,
    batch: dict[str, Tensor],
    labels: Tensor,
    *,
    kl: float = 0.0,
    temperature: float = 1.0,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Tensor:
    """The sum over all targets of -log p + kl * temperature^2 * KL(original || model), in nats.

    model: as it is called, wrapped or not. network: the causal language model in it. labels [B, T], not shifted. The
    original is the network itself without its residuals, mixers and adapters (see `training.bypass`); both
    distributions of the divergence are those at `temperature` (Hinton et al., 2015, section 2.1).
    """
    is_target = torch.zeros_like(labels, dtype=torch.bool)
    is_target[:, :-1] = labels[:, 1:] != IGNORED  # of the positions that predict one
    targets = labels[:, 1:][labels[:, 1:] != IGNORED]
    head = network.get_output_embeddings()
    positions = max(1, logits_at_once // head.weight.shape[0])
    teacher = None
    if kl:
        with torch.no_grad(), bypassed(network), _in_place_of(head, lambda hidden, _: hidden[is_target]):
            teacher = model(**batch, use_cache=False).logits

    def loss(hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = hidden[is_target]

        def part(states: Tensor, part_targets: Tensor, teacher_states: Tensor | None) -> Tensor:
            logits = _precise(forward(states))
            nats = F.cross_entropy(logits, part_targets, reduction="sum")
            if teacher_states is None:
                return nats
            with torch.no_grad():
                log_p = (_precise(forward(teacher_states)) / temperature).log_softmax(-1)
            log_q = (logits / temperature).log_softmax(-1)
            return nats + kl * temperature**2 * F.kl_div(log_q, log_p, reduction="sum", log_target=True)

        if len(hidden) <= positions:
            return part(hidden, targets, teacher)
        parts = zip(
            hidden.split(positions),
            targets.split(positions),
            teacher.split(positions) if teacher is not None else [None] * -(-len(hidden) // positions),
            strict=True,
        )
        return torch.stack([checkpoint(part, *inputs, use_reentrant=False) for inputs in parts]).sum()

    with _in_place_of(head, loss):
        return model(**batch, use_cache=False).logits


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@contextlib.contextmanager
def _in_place_of(head: nn.Module, function: Callable[[Tensor, Callable[[Tensor], Tensor]], Any]) -> Iterator[None]:
    """Meanwhile the head returns `function(hidden states, its own forward)`."""
    own = head.forward
    head.forward = lambda hidden: function(hidden, own)
    try:
        yield
    finally:
        del head.forward
        if head.forward.__func__ is not getattr(own, "__func__", None):  # it was an attribute of the instance already
            head.forward = own
