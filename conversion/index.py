"""The index of a sharded checkpoint, from what was written."""

from pathlib import Path
from typing import Any

from transformer2.conversion.checkpoints import read_header
from transformer2.conversion.llama_sources import EMBEDDING, HEAD


def build_index(shards: list[Path], tied: bool) -> dict[str, Any]:
    """The index of the shards as written. A head that repeats the tied embeddings is no further parameter."""
    tensors = {name: entry for shard in shards for name, entry in read_header(shard).items()}
    counted = set(tensors) - ({HEAD} if tied and EMBEDDING in tensors else set())
    return {
        "metadata": {
            "total_size": sum(entry.end - entry.start for entry in tensors.values()),
            "total_parameters": sum(tensors[name].num_elements for name in counted),
        },
        "weight_map": {name: tensors[name].file.name for name in sorted(tensors)},
    }
