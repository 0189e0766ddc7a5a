"""Time and memory of every local mixer as the text grows, against a dense-mask sliding window in the same run.

    python benchmarks/local_mixer.py [--lengths 1024 4096 16384 32768] [--window 128] [--rounds 3] [--out build/mixers]

Forward passes over a text of width 512 (8 heads) in float32 on one thread: CPU seconds, the best of the rounds, and
the bytes of the largest tensor, found by intercepting every operation. The first rows are the operator alone, on given
queries, keys and values: `scaled_dot_product_attention` with a T x T mask, and ours ("speed-up" is their ratio). The
others are whole mixers, with their projections, at all their places in a layer; "of a block" is their share of the
time of a layer that has them, where global attention is affordable. Writes OUT.json, OUT.md and OUT.png.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from steady import keep_memory
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from transformer2 import Transformer2Config, Transformer2Model
from transformer2.sequence import width_of
from transformer2.short_swa import windowed_attention
from transformer2.variants import build_local_mixer, local_places

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 256,
}


def mixers(window: int) -> dict[str, dict[str, Any]]:
    return {
        "short_conv": {"type": "short_conv"},
        "short_conv gated": {"type": "short_conv", "gated": True},
        "canon A": {"type": "canon", "letters": "A"},
        "canon AC": {"type": "canon", "letters": "AC"},
        "canon ABCD": {"type": "canon"},
        f"short_swa w={window}": {"type": "short_swa", "window": window},
        f"short_swa w={window} chunk": {"type": "short_swa", "window": window, "mask": "chunk"},
    }


class Peak(TorchDispatchMode):
    """The largest tensor that any operation made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """What a sliding window costs where it is a mask: [B, H, T, d] each."""
    steps = torch.arange(query.shape[2])
    distance = steps[:, None] - steps
    mask = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def operators(length: int, window: int, rounds: int, longest_dense: int) -> list[dict[str, Any]]:
    """The two rows of the operator alone."""
    heads = SIZES["num_attention_heads"]
    query, key, value = torch.randn(3, 1, heads, length, SIZES["hidden_size"] // heads)
    ours, ours_bytes = measure(lambda: windowed_attention(query, key, value, window), rounds)
    rows = [{"mixer": f"operator, w={window}", "seconds": ours, "bytes": ours_bytes}]
    if length <= longest_dense:
        seconds, peak = measure(lambda: dense(query, key, value, window), rounds)
        rows[0]["speedup"] = seconds / ours
        rows.insert(0, {"mixer": "operator, dense mask", "seconds": seconds, "bytes": peak})
    return rows


def whole_mixer(config: Transformer2Config, length: int, rounds: int) -> tuple[float, int]:
    """CPU seconds of a mixer at all its places in one layer, and the bytes of the largest tensor."""
    positions, figures = torch.arange(length)[None], []
    for place in local_places(config, 0):
        mixer = build_local_mixer(config, 0, place)
        for module in mixer.modules():  # a model does that; numbers as memory holds them may be slow ones
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        x = torch.randn(1, length, width_of(config, place))
        figures.append(measure(lambda x=x, m=mixer: m(x, position_ids=positions, token_index=positions), rounds))
    return sum(seconds for seconds, _ in figures), max(peak for _, peak in figures)


def measure(function, rounds: int) -> tuple[float, int]:
    """CPU seconds (best of the rounds) and the bytes of the largest tensor."""
    with torch.no_grad():
        with Peak() as peak:
            function()
        seconds = []
        for _ in range(rounds):
            start = time.process_time()
            function()
            seconds.append(time.process_time() - start)
    return min(seconds), peak.bytes


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| T | what | ms | largest tensor, MB | speed-up | of a block |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = f"{row['share']:.1%}" if "share" in row else ""
        ratio = f"{row['speedup']:.1f}" if "speedup" in row else ""
        cells = [str(row["length"]), row["mixer"], f"{1e3 * row['seconds']:.1f}", f"{row['bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join([*cells, ratio, share]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for name in dict.fromkeys(row["mixer"] for row in rows):
        mine = [row for row in rows if row["mixer"] == name]
        for axis, key, factor in ((axes[0], "seconds", 1e3), (axes[1], "bytes", 1e-6)):
            axis.loglog([row["length"] for row in mine], [factor * row[key] for row in mine], marker="o", label=name)
    axes[0].set_ylabel("ms, forward")
    axes[1].set_ylabel("MB, largest tensor")
    for axis in axes:
        axis.set_xlabel("tokens")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest-dense", type=int, default=16384, help="a T x T mask beyond this is left out")
    parser.add_argument("--longest-block", type=int, default=4096, help="global attention beyond this is left out")
    parser.add_argument("--out", type=Path, default=Path("build/mixers"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    torch.manual_seed(0)
    rows = []
    for length in tqdm(options.lengths, disable=None):
        found = operators(length, options.window, options.rounds, options.longest_dense)
        for name, choice in mixers(options.window).items():
            config = Transformer2Config(**SIZES, local_mixer=choice)
            seconds, peak = whole_mixer(config, length, options.rounds)
            row = {"mixer": name, "seconds": seconds, "bytes": peak}
            if length <= options.longest_block:
                x, model = torch.randn(1, length, SIZES["hidden_size"]), Transformer2Model(config).eval()
                block, _ = measure(lambda x=x, m=model: m(inputs_embeds=x, use_cache=False), options.rounds)
                row["share"] = seconds / block
            found.append(row)
        rows += [{"length": length, **row} for row in found]
    print(table(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=2))
    options.out.with_suffix(".md").write_text(table(rows) + "\n")
    plot(rows, options.out.with_suffix(".png"))
    print(f"Written: {options.out}.json, .md and .png")


if __name__ == "__main__":
    main()
