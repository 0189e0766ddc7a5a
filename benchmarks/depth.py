"""What every residual costs: time relative to `standard`, and the activations that autograd keeps.

    python benchmarks/depth.py [--layers 8 16] [--rounds 5] [--compile] [--only mudd mhc] [--out build/depth]

Time: forward, and forward + backward, of a whole model of width 768 over 512 tokens in float32. A variant and
`standard` take turns in the same process, and the figure is the median over rounds of their ratio: CPU seconds, one
thread. Memory: what autograd has saved at the end of the forward pass, parameters left out, in units of one [B, T, D]
tensor in float32 and per layer (width 128, 64 tokens, from 8 to 16 layers), also with every layer checkpointed.
Writes OUT.json, OUT.md and OUT.png.
"""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from steady import keep_memory
from tqdm import tqdm

from transformer2 import Transformer2Config, Transformer2ForCausalLM

VARIANTS: dict[str, Any] = {
    "ddl d_v=1": "ddl",
    "ddl CC d_v=4": {"type": "ddl", "value_channels": 4},
    "elc_bert": "elc_bert",
    "denseformer 1x1": "denseformer",
    "denseformer 4x5": {"type": "denseformer", "dilation": 4, "period": 5},
    "vertical_attention qk": {"type": "vertical_attention", "form": "identity"},
    "dca": "dca",
    "dca k=2": {"type": "dca", "window": 2},
    "mudd": "mudd",
    "attn_res full": {"type": "attn_res", "block_size": 1, "form": "identity"},
    "attn_res 8 blocks": {"type": "attn_res", "form": "identity"},
    "delta_attn_res 8 blocks": {"type": "delta_attn_res", "form": "identity"},
    "short_swa K=4": "short_swa",
    "hyper_connections x4": "hyper_connections",
    "mhc x4": "mhc",
    "laurel": "laurel",
}
TARGETS = {  # forward + backward relative to `standard`
    "ddl d_v=1": 1.05,
    "ddl CC d_v=4": 1.20,
    "denseformer 1x1": 1.10,
    "attn_res 8 blocks": 1.12,
    "dca k=2": 1.20,
    "mudd": 1.25,
    "hyper_connections x4": 1.35,
    "mhc x4": 1.5,
}
WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "vocab_size": 2048}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def build(residual: Any, layers: int, sizes: dict[str, int]) -> Transformer2ForCausalLM:
    torch.manual_seed(0)
    return Transformer2ForCausalLM(Transformer2Config(**sizes, num_hidden_layers=layers, residual=residual)).train()


def seconds(model: Any, ids: torch.Tensor, backward: bool) -> float:
    """CPU seconds of one pass."""
    start = time.process_time()
    if backward:
        model(ids, labels=ids, use_cache=False).loss.backward()
    else:
        with torch.no_grad():
            model(ids, use_cache=False)
    elapsed = time.process_time() - start
    model.zero_grad(set_to_none=True)
    return elapsed


def ratios(residual: Any, layers: int, rounds: int, compiled: bool) -> dict[str, float]:
    """Time of a variant over that of `standard`, median over rounds."""
    models = [build(kind, layers, WIDE) for kind in ("standard", residual)]
    if compiled:
        torch._dynamo.reset()
        models = [torch.compile(model) for model in models]
    ids = torch.randint(0, WIDE["vocab_size"], (1, 512), generator=torch.Generator().manual_seed(0))
    figures = {}
    for backward, name in ((False, "forward"), (True, "forward + backward")):
        for model in models:
            seconds(model, ids, backward)  # warm up
        pairs = [[seconds(model, ids, backward) for model in models] for _ in range(rounds)]
        figures[name] = statistics.median(variant / standard for standard, variant in pairs)
    return figures


def saved_bytes(residual: Any, layers: int, checkpointing: bool) -> int:
    """Bytes of the distinct tensors that autograd holds after a forward pass, without parameters."""
    model = build(residual, layers, SMALL)
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(1, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(ids, use_cache=False).logits
    held = sum(storage.nbytes() for storage in saved.values())
    del out
    return held


def slope(residual: Any, checkpointing: bool) -> float:
    """Activations per layer, in [B, T, D] tensors of float32."""
    unit = 64 * SMALL["hidden_size"] * 4
    return (saved_bytes(residual, 16, checkpointing) - saved_bytes(residual, 8, checkpointing)) / 8 / unit


def table(figures: dict[str, dict[str, float]]) -> str:
    columns = list(next(iter(figures.values())))
    lines = ["| variant | " + " | ".join(columns) + " | target |", "|---|" + "---|" * (len(columns) + 1)]
    for name, row in figures.items():
        cells = [f"{row[column]:.2f}" for column in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {TARGETS.get(name, '')} |")
    return "\n".join(lines)


def plot(figures: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in figures if name != "standard"]
    timed = [column for column in next(iter(figures.values())) if "forward" in column]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.4 * len(names) + 2), sharey=True)
    height = 0.8 / len(timed)
    for index, column in enumerate(timed):
        places = [place + index * height for place in range(len(names))]
        left.barh(places, [figures[name][column] for name in names], height, label=column)
    left.axvline(1, color="black", linewidth=0.8)
    left.set_yticks(range(len(names)), names)
    left.set_xlabel("time relative to standard")
    left.legend(fontsize=8)
    for index, column in enumerate(("activations per layer", "the same, checkpointed")):
        places = [place + index * 0.4 for place in range(len(names))]
        right.barh(places, [figures[name][column] for name in names], 0.4, label=column)
        right.axvline(figures["standard"][column], color="black", linewidth=0.8)
    right.set_xlabel("[B, T, D] tensors kept per layer (line: standard)")
    right.legend(fontsize=8)
    left.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also the compiled model, at the first depth")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, default=Path("build/depth"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    names = options.only or list(VARIANTS)
    figures: dict[str, dict[str, float]] = {"standard": {}}
    for name in tqdm(["standard", *names], disable=None):
        residual = VARIANTS.get(name, "standard")
        row = figures.setdefault(name, {})
        for layers in options.layers:
            measured = ratios(residual, layers, options.rounds, compiled=False) if name != "standard" else {}
            for kind in ("forward", "forward + backward"):
                row[f"{kind}, L={layers}"] = measured.get(kind, 1.0)
        if options.compile:
            measured = ratios(residual, options.layers[0], options.rounds, True) if name != "standard" else {}
            for kind in ("forward", "forward + backward"):
                row[f"{kind}, compiled, L={options.layers[0]}"] = measured.get(kind, 1.0)
        row["activations per layer"] = slope(residual, False)
        row["the same, checkpointed"] = slope(residual, True)
        gc.collect()
        options.out.with_suffix(".json").write_text(json.dumps(figures, indent=2))  # a long run can be read early
        options.out.with_suffix(".md").write_text(table(figures) + "\n")
    print(table(figures))
    plot(figures, options.out.with_suffix(".png"))
    print(f"Written: {options.out}.json, .md and .png")


if __name__ == "__main__":
    main()
