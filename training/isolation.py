"""A check, before training, that packed documents really do not see each other on this machine's attention backend.

The library loses the isolation without a word when a mask or a cache slips in, and the loss still falls.
"""

import numpy as np
import torch
from torch import nn

from transformer2.errors import CheckFailed
from transformer2.training.packing import Row, Rows, collate

LONGEST = 32  # tokens of each document that are compared
TOLERANCE = 0.05  # of the spread of the logits; rounding in bfloat16 gives below 0.01, a leak 0.1 and more


def check_isolation(model: nn.Module, rows: Rows, device: torch.device) -> bool:
    """Compare the logits of a document behind another one with those of the document alone.

    False where no row holds two documents, so that there is nothing to compare. Raises CheckFailed where the logits
    differ by more than rounding.
    """
    packed = _two_documents(rows)
    if packed is None:
        return False
    start = int((packed.position_ids == 0).nonzero()[0][-1])  # of the second document
    alone = Row(*(array[start:] for array in (packed.input_ids, packed.position_ids, packed.labels, packed.num_bytes)))
    training = model.training
    model.eval()
    with torch.no_grad():
        behind, alone = (_logits(model, row, device) for row in (packed, alone))
    model.train(training)
    difference = (behind[start:] - alone).abs().mean() / alone.std()
    if difference > TOLERANCE:
        raise CheckFailed(
            f"Packed documents see each other (logits differ by {difference:.2f} of their spread): the attention "
            f"backend {model.config._attn_implementation!r} ignores position_ids; use sdpa or eager."
        )
    return True


def _two_documents(rows: Rows) -> Row | None:
    """The end of one document and the beginning of the next, from the first row that has two."""
    for row in (rows[int(i)] for i in np.flatnonzero(np.diff(rows.first) > 1)):
        starts = (row.position_ids == 0).nonzero()[0]
        if len(starts) > 1:
            second = int(starts[1])
            end = min(int(starts[2]) if len(starts) > 2 else len(row.input_ids), second + LONGEST)
            begin = max(0, second - LONGEST)
            positions = row.position_ids[begin:end].copy()
            positions[: second - begin] -= positions[0]
            return Row(row.input_ids[begin:end], positions, row.labels[begin:end], row.num_bytes[begin:end])
    return None


def _logits(model: nn.Module, row: Row, device: torch.device) -> torch.Tensor:
    batch = collate([row], device)
    del batch["labels"]
    return model(**batch, use_cache=False).logits[0].float()
