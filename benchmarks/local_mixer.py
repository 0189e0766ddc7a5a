"""Time and memory of every local mixer as the text grows, against a dense-mask sliding window in the same run.

    python benchmarks/local_mixer.py [--lengths 1024 4096 16384 32768] [--window 128] [--rounds 3] [--out build/mixers]

Forward passes of one mixer over a text of width 512 (8 heads) in float32 on one thread: CPU seconds, the best of the
rounds, and the bytes of the largest tensor, found by intercepting every operation. "dense mask" is what a sliding
window costs through `scaled_dot_product_attention` with a T x T mask. "of a block" is the share that the mixer has of
the time of a whole layer at the first length. Writes OUT.json, OUT.md and OUT.png.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from transformer2 import Transformer2Config, Transformer2Model
from transformer2.layers import apply_rotary, rope_frequencies, rotations
from transformer2.variants import build_local_mixer

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
        f"short_swa w={window}": {"type": "short_swa", "window": window},
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


def dense(swa, x: torch.Tensor, window: int, theta: float) -> torch.Tensor:
    """The projections of ShortSWA around dense attention with a band mask."""
    length = x.shape[1]
    query, key, value = (swa.split(project(x)) for project in (swa.query, swa.key, swa.value))
    positions = torch.arange(length)[None]
    cos, sin = rotations(positions, rope_frequencies(swa.head_dim, theta))
    query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
    steps = torch.arange(length)
    distance = steps[:, None] - steps
    mask = (distance >= 0) & (distance < window)
    return swa.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


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
    lines = ["| T | mixer | ms | largest tensor, MB | dense mask / this | of a block |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = f"{row['share']:.1%}" if row.get("share") is not None else ""
        ratio = f"{row['speedup']:.1f}" if row.get("speedup") is not None else ""
        lines.append(
            f"| {row['length']} | {row['mixer']} | {1e3 * row['seconds']:.1f} | {row['bytes'] / 1e6:.1f} | {ratio} | "
            f"{share} |"
        )
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
    parser.add_argument("--out", type=Path, default=Path("build/mixers"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for length in tqdm(options.lengths, disable=None):
        x = torch.randn(1, length, SIZES["hidden_size"])
        positions = torch.arange(length)[None]
        dense_seconds = None
        if length <= options.longest_dense:
            config = Transformer2Config(**SIZES, local_mixer={"type": "short_swa", "window": options.window})
            mixer = build_local_mixer(config, 0, "layer")
            dense_seconds, peak = measure(
                lambda x=x, mixer=mixer: dense(mixer.swa, x, options.window, mixer.rope_theta), options.rounds
            )
            rows.append({"length": length, "mixer": "dense mask", "seconds": dense_seconds, "bytes": peak})
        for name, choice in mixers(options.window).items():
            config = Transformer2Config(**SIZES, local_mixer=choice)
            place = "attn" if choice["type"] == "canon" else "layer"
            mixer = build_local_mixer(config, 0, place)
            seconds, peak = measure(
                lambda x=x, mixer=mixer, p=positions: mixer(x, position_ids=p, token_index=p), options.rounds
            )
            row = {"length": length, "mixer": name, "seconds": seconds, "bytes": peak}
            if dense_seconds is not None:
                row["speedup"] = dense_seconds / seconds
            if length == options.lengths[0]:
                model = Transformer2Model(config).eval()
                block, _ = measure(lambda x=x, m=model: m(inputs_embeds=x, use_cache=False), options.rounds)
                row["share"] = seconds / block
            rows.append(row)
    print(table(rows))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=2))
    options.out.with_suffix(".md").write_text(table(rows) + "\n")
    plot(rows, options.out.with_suffix(".png"))
    print(f"Written: {options.out}.json, .md and .png")


if __name__ == "__main__":
    main()
