"""What a conversion would do, from headers alone: no weight is read, and of a model on the Hub none is downloaded."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from transformer2 import Transformer2Config, Transformer2Model
from transformer2.conversion.checkpoints import Checkpoint, open_checkpoint, read_json
from transformer2.conversion.costs import cost
from transformer2.conversion.hub_headers import RemoteCheckpoint, open_remote
from transformer2.conversion.llama_sources import LlamaSource, check_llama
from transformer2.conversion.new_parameters import new_tensors
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.conversion.probes import original_window, rounding_allowed
from transformer2.conversion.results import Plan
from transformer2.conversion.sources import Source, local_source
from transformer2.conversion.target_config import build_config, departs_from_identity, refuse_unknown_names
from transformer2.errors import MachineError, UserError


@plain_os_errors()
def plan(
    source: str | Path,
    *,
    residual: str | dict[str, Any] | None = None,
    local_mixer: str | dict[str, Any] | None = None,
    revision: str | None = None,
    assume_tied: bool = False,
) -> Plan:
    """What `convert` would make of a folder or a model on the Hub, with arguments as `convert` has them.

    "possible" is False, and "refusal" the reason, where `convert` would refuse the source or the options. Raises
    UserError for unknown names of variants and options, and if there is no such source.
    """
    refuse_unknown_names("residual", residual)
    refuse_unknown_names("local_mixer", local_mixer)
    if user_path(source).suffix == ".gguf":
        raise UserError(f"{source} is a GGUF file, which `convert` dequantises first; plan the folder that it makes.")
    origin = local_source(source, revision)
    named: dict[str, Any] = {"name": str(source) if origin is None else origin.name, "commit": None}
    try:
        if origin is None:
            origin, checkpoint = open_remote(str(source), revision)
            named["commit"] = origin.commit
        else:
            checkpoint = open_checkpoint(origin.folder)
        llama = check_llama(checkpoint, assume_tied)
        config = build_config(llama, residual, local_mixer)
    except MachineError:
        raise
    except UserError as error:
        if origin is None:  # no source, rather than a bad one
            raise
        return {"possible": False, "refusal": str(error), "source": named}
    return {"possible": True, "refusal": None, "source": named, **_describe(origin, checkpoint, llama, config)}


def _describe(
    origin: Source, checkpoint: Checkpoint, llama: LlamaSource, config: Transformer2Config
) -> dict[str, Any]:
    described = new_tensors(config, llama)
    new_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in described.values())
    by_layer = [0] * config.num_hidden_layers
    for name, (shape, _) in described.items():
        if layer := re.match(r"model\.layers\.(\d+)\.", name):
            by_layer[int(layer[1])] += math.prod(shape)
    new_parameters = sum(math.prod(shape) for shape, _ in described.values())
    sizes: dict[str, int] = {}
    for name, entry in checkpoint.tensors.items():
        part = re.match(r"model\.layers\.\d+\.|", name)[0] or name
        sizes[part] = sizes.get(part, 0) + entry.num_elements
    parameters = sum(entry.num_elements for entry in checkpoint.tensors.values())
    added = cost(config, config.residual, config.local_mixer)
    departure = departs_from_identity(config, llama)
    exact = rounding_allowed(config, torch.float32) == 0.0
    return {
        "family": llama.config.model_type,
        "layers": config.num_hidden_layers,
        "dtype": str(llama.dtype).removeprefix("torch."),
        "shards": len(checkpoint.shards),
        "residual": config.residual,
        "local_mixer": config.local_mixer,
        "base_parameters": parameters,
        "base_bytes": checkpoint.num_bytes,
        "new_parameters": new_parameters,
        "new_parameters_by_layer": by_layer,
        "new_parameters_elsewhere": new_parameters - sum(by_layer),
        "new_bytes": new_bytes,
        "bytes_to_write": {"link": new_bytes, "reflink": new_bytes, "copy": checkpoint.num_bytes + new_bytes},
        "memory": {
            "convert": new_bytes + 64 * 2**20,
            "verify": 4 * (parameters + new_parameters),
            "verify_by_layer": 4 * (max(sizes.values()) + new_parameters),
        },
        "extra_flops_per_token": added["extra_flops_per_token"],
        "extra_flops_share": added["extra_flops_share"],
        "cache": cache_bytes(config, llama.dtype),
        "expected_level": "L1" if departure else "L4",
        "expected_start": departure or ("bit for bit the source" if exact else "the source up to rounding"),
        "tie_word_embeddings": config.tie_word_embeddings,
        "warnings": [*llama.notes, *_warnings(origin, checkpoint, llama)],
    }


def cache_bytes(config: Transformer2Config, dtype: torch.dtype, length: int = 16) -> dict[str, int]:
    """Bytes of keys and values per token, and those that a sequence of any length takes besides, measured."""
    with torch.device("meta"):
        model = Transformer2Model._from_config(config, dtype=dtype).eval()
        ids = positions = torch.zeros(1, length, dtype=torch.long)
        cache = DynamicCache(config=config)
        masks = {"full_attention": None, "sliding_attention": None, "token_mask": None, "seq_idx": None}
        with torch.no_grad():
            model(
                ids,
                attention_mask={**masks, "token_index": positions},
                position_ids=positions,
                cache=cache,
                use_cache=True,
            )
    keys = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    states = [
        state
        for layer in cache.layers
        for state in getattr(layer, "conv_states", {}).values()
        if isinstance(state, torch.Tensor)
    ]
    return {
        "keys_and_values_per_token": sum(t.numel() // t.shape[-2] * t.element_size() for t in keys),
        "extra_per_sequence": sum(t.numel() * t.element_size() for t in states),
    }


def _warnings(origin: Source, checkpoint: Checkpoint, llama: LlamaSource) -> list[str]:
    """What is unusual about a source, and what the conversion does about it."""
    config, warnings = llama.config, []
    rows, words = config.vocab_size, vocabulary(origin.folder)
    if words is not None and words != rows:
        if words < rows:
            warnings.append(f"The vocabulary has {rows:,} rows for {words:,} tokens of the tokenizer; all are kept.")
        else:
            warnings.append(f"The tokenizer has {words:,} tokens, but the embeddings only {rows:,} rows: check both.")
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        warnings.append(
            f"Rope scaling {kind!r} beyond {original_window(config):,} positions is kept, and probed across that line."
        )
    if biases := sorted({name.split(".")[-2] for name in checkpoint.tensors if name.endswith(".bias")}):
        warnings.append(f"The source has biases ({', '.join(biases)}); all are kept.")
    kinds = {entry.dtype for entry in checkpoint.tensors.values()}
    if len(kinds) > 1:
        warnings.append(f"Tensors are stored in several types ({', '.join(sorted(kinds))}); each keeps its own.")
    if isinstance(checkpoint, RemoteCheckpoint) and any("embeddings" in note for note in llama.notes):
        warnings.append("Whether head and embeddings are equal was judged by their first 64 KiB.")
    return warnings


def vocabulary(folder: Path) -> int | None:
    """How many token ids the tokenizer of a folder can make, if it has a tokenizer.json."""
    if not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = read_json(folder / "tokenizer.json")
    words = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = list(words.values()) if isinstance(words, dict) else list(range(len(words)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or () if "id" in token]
    return max(ids, default=-1) + 1 or None
