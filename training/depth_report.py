"""What a model's residuals do on a text: how much every read counts its sources, and what DDL writes and erases."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer2.conversion.paths import plain_os_errors
from transformer2.depth_sources import DepthWeights
from transformer2.errors import UserError
from transformer2.training.data import read_documents
from transformer2.training.loading import find_checkpoint, load_model, load_tokenizer

GATE_BINS = 40  # over (0, 2)


@plain_os_errors()
def depth_report(
    model: str | Path, text: str | Path, max_tokens: int = 512, text_column: str = "text"
) -> dict[str, Any]:
    """Means over the first `max_tokens` tokens of a text, read by read.

    "reads": for each its layer, site, and the mean weight of every source, oldest first, in every group (heads, or the
    inputs for queries, keys, values and residual). For DDL, "rewrites": the histogram of the gate over (0, 2), and
    what multiple of a sublayer's output was written and erased, with the share that erasing has in both together.

    Raises UserError for a missing checkpoint, tokenizer or text, and for a model whose residual weights nothing.
    """
    if max_tokens < 1:
        raise UserError(f"At least one token must be read, got max_tokens={max_tokens}.")
    folder = find_checkpoint(model)
    tokenizer = load_tokenizer(folder)
    ids: list[int] = []
    for document in read_documents(text, text_column=text_column):
        ids += tokenizer(document[: 50 * max_tokens])["input_ids"]  # more cannot be needed
        if len(ids) >= max_tokens:
            break
    network = load_model(folder, torch.float32).eval()
    ids = ids[: min(max_tokens, network.config.max_position_embeddings)]
    if not ids:
        raise UserError(f"{text} holds no tokens.")
    with torch.no_grad(), recorded(network) as records:
        network(torch.tensor([ids]), use_cache=False)
    residual = network.config.residual["type"]
    if not records:
        raise UserError(f"The residual {residual!r} of {model} is not a weighted sum: there is nothing to draw.")
    report = {"residual": residual, "layers": network.config.num_hidden_layers, "tokens": len(ids)}
    if residual == "ddl":
        return {**report, "rewrites": [_rewrite(*record) for record in records]}
    return {**report, "reads": [_read(*record) for record in records]}


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[tuple[int | None, str, Tensor]]]:
    """Collects (layer or None for the end, site, weights [G, n, B, T]) of every read while it is open."""
    records: list[tuple[int | None, str, Tensor]] = []
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, DepthWeights):
            place = re.search(r"layers\.(\d+)\.(\w+)_residual", name)

            def record(_, __, weights, place=place):
                if place:
                    records.append((int(place[1]), place[2], weights))
                elif model.config.residual["type"] == "short_swa":  # one module serves all layers, in order
                    records.append((len(records), "attn", weights))
                else:
                    records.append((None, "end", weights))

            handles.append(module.register_forward_hook(record))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _read(layer: int | None, site: str, weights: Tensor) -> dict[str, Any]:
    return {"layer": layer, "site": site, "weights": weights.mean((2, 3)).tolist()}


def _rewrite(layer: int | None, site: str, weights: Tensor) -> dict[str, Any]:
    gate, written, erased = weights.float()
    histogram = torch.histc(gate[0], bins=GATE_BINS, min=0, max=2)
    write, erase = written.abs().sum().item(), erased.abs().sum().item()
    return {
        "layer": layer,
        "site": site,
        "gate_mean": gate.mean().item(),
        "gate_histogram": (histogram / histogram.sum()).tolist(),
        "written": written.mean().item(),
        "erased": erased.mean().item(),
        "erase_share": erase / (write + erase) if write + erase else 0.0,
    }
