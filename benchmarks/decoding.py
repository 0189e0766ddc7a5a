"""Tokens per second while decoding, of every local mixer and residual, relative to the plain model in the same run.

    python benchmarks/decoding.py [--prompt 256] [--tokens 64] [--rounds 5] [--only ...] [--out build/decoding]

Greedy decoding with a dynamic cache, batch 1, of a model of width 512 with 8 layers in float32 on one thread. A
variant and the plain model take turns; the figure is the median over rounds of the ratio of their CPU times. Writes
OUT.json, OUT.md and OUT.png.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from steady import keep_memory
from tqdm import tqdm
from transformers import DynamicCache

from transformer2 import Transformer2Config, Transformer2ForCausalLM

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "none (again)": {},
    "short_conv": {"local_mixer": "short_conv"},
    "short_conv gated": {"local_mixer": {"type": "short_conv", "gated": True}},
    "canon A": {"local_mixer": {"type": "canon", "letters": "A"}},
    "canon AC": {"local_mixer": {"type": "canon", "letters": "AC"}},
    "canon ABCD": {"local_mixer": "canon"},
    "short_swa w=128": {"local_mixer": "short_swa"},
    "short_swa w=16": {"local_mixer": {"type": "short_swa", "window": 16}},
    "short_swa w=128 chunk": {"local_mixer": {"type": "short_swa", "mask": "chunk"}},
    "short_swa w=128 at qkv": {"local_mixer": {"type": "short_swa", "site": "qkv"}},
    "ddl d_v=1": {"residual": "ddl"},
    "ddl CC d_v=4": {"residual": {"type": "ddl", "value_channels": 4}},
    "ddl TC d_v=4": {"residual": {"type": "ddl", "value_channels": 4, "compress": "tokens"}},
    **{
        name: {"residual": name}
        for name in (
            *("elc_bert", "denseformer", "vertical_attention", "dca", "mudd", "attn_res", "delta_attn_res"),
            *("hyper_connections", "mhc", "laurel"),
        )
    },
    "depth short_swa": {"residual": "short_swa"},
}


def build(choice: dict[str, Any]) -> Transformer2ForCausalLM:
    torch.manual_seed(0)
    return Transformer2ForCausalLM(Transformer2Config(**SIZES, **choice)).eval()


def seconds_per_token(model: Any, prompt: torch.Tensor, count: int) -> float:
    """CPU seconds per decoded token, without the prompt's."""
    cache = DynamicCache(config=model.config)
    logits = model(prompt, cache=cache, use_cache=True).logits
    start = time.process_time()
    for _ in range(count):
        logits = model(logits[:, -1:].argmax(-1), cache=cache, use_cache=True).logits
    return (time.process_time() - start) / count


@torch.no_grad()
def relative_speed(choice: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second over those of the plain model, and those of the variant."""
    models = [build({}), build(choice)]
    prompt = torch.randint(SIZES["vocab_size"], (1, options.prompt), generator=torch.Generator().manual_seed(0))
    for model in models:
        seconds_per_token(model, prompt, 4)  # warm up
    pairs = [[seconds_per_token(model, prompt, options.tokens) for model in models] for _ in range(options.rounds)]
    return {
        "relative": statistics.median(plain / variant for plain, variant in pairs),
        "tokens_per_second": 1 / statistics.median(variant for _, variant in pairs),
    }


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = ["| variant | tokens/s relative to plain | tokens/s |", "|---|---|---|"]
    lines += [f"| {name} | {row['relative']:.2f} | {row['tokens_per_second']:.0f} |" for name, row in figures.items()]
    return "\n".join(lines)


def plot(figures: dict[str, dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.3 * len(figures) + 1.2))
    axis.barh(list(figures), [row["relative"] for row in figures.values()])
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel("tokens per second relative to the plain model, decoding")
    axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=256, help="tokens in the cache before the first measured one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--out", type=Path, default=Path("build/decoding"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, float]] = {}
    for name in tqdm(options.only or list(VARIANTS), disable=None):
        figures[name] = relative_speed(VARIANTS[name], options)
        options.out.with_suffix(".json").write_text(json.dumps(figures, indent=2))
        options.out.with_suffix(".md").write_text(table(figures) + "\n")
    print(table(figures))
    plot(figures, options.out.with_suffix(".png"))
    print(f"Written: {options.out}.json, .md and .png")


if __name__ == "__main__":
    main()
