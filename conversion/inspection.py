"""What is inside a Transformer2 checkpoint, from its config, its headers and its few scalar parameters."""

import re
from pathlib import Path
from typing import Any

from transformer2.conversion.checkpoints import DTYPES, PROVENANCE, TensorEntry, open_checkpoint, read_json
from transformer2.conversion.new_parameters import is_new
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.errors import UserError

SCALARS = ("carry", "erase")


@plain_os_errors()
def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """Variants, their parameters per kind, DDL's carry and erase, provenance. Raises UserError if it is not ours.

    "variant_parameters" are those of residuals and local mixers; only in a converted model are they "new_parameters".
    """
    folder = user_path(path)
    if not folder.is_dir():
        raise UserError(f"There is no folder {path}.")
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if config.get("model_type") != "transformer2":
        raise UserError(f"{path} is no Transformer2 checkpoint: its config.json says {config.get('model_type')!r}.")
    own = {name: entry for name, entry in checkpoint.tensors.items() if is_new(name)}
    report: dict[str, Any] = {
        "residual": config["residual"],
        "local_mixer": config["local_mixer"],
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "tie_word_embeddings": config.get("tie_word_embeddings"),
        "parameters": sum(entry.num_elements for entry in checkpoint.tensors.values()),
        "variant_parameters": sum(entry.num_elements for entry in own.values()),
        "kinds": _kinds(own),
    }
    if scalars := _scalars(own):
        report["scalars"] = scalars
    if (folder / PROVENANCE).is_file():
        provenance = read_json(folder / PROVENANCE)
        report["new_parameters"] = report["variant_parameters"]
        report["provenance"] = {
            name: value for name, value in provenance.items() if name not in ("files", "new_tensors", "original")
        }
    if (folder / "verification.json").is_file():
        result = read_json(folder / "verification.json")
        report["verification"] = {name: result.get(name) for name in ("level", "passed", "failures")}
    return report


def _kinds(own: dict[str, TensorEntry]) -> list[dict[str, Any]]:
    """The tensors of the variants, those of different layers together."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for name, entry in own.items():
        kind = re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        key = (kind, entry.dtype, entry.shape)
        row = {"name": kind, "dtype": DTYPES.get(entry.dtype, entry.dtype), "shape": list(entry.shape)}
        kinds.setdefault(key, {**row, "tensors": 0, "parameters": 0})
        kinds[key]["tensors"] += 1
        kinds[key]["parameters"] += entry.num_elements
    return sorted(kinds.values(), key=lambda row: row["name"])


def _scalars(own: dict[str, TensorEntry]) -> dict[str, dict[str, Any]]:
    """carry and erase of DDL's identity form, by layer: how far the model has moved towards the published rule."""
    from safetensors import safe_open

    groups: dict[str, dict[int, float]] = {}
    for name, entry in own.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)_residual\.rewrite\.(\w+)", name)
        if match and match[3] in SCALARS and entry.shape == (1,):
            with safe_open(entry.file, "pt") as shard:
                value = shard.get_tensor(name).item()
            groups.setdefault(f"{match[2]} {match[3]}", {})[int(match[1])] = value
    report = {}
    for group, by_layer in sorted(groups.items()):
        values = [by_layer[layer] for layer in sorted(by_layer)]
        low, mean, high = min(values), sum(values) / len(values), max(values)
        report[group] = {"min": low, "mean": mean, "max": high, "by_layer": values}
    return report
