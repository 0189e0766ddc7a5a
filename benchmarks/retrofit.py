"""A real Llama converted to every residual and local mixer: is it the same function?

    python benchmarks/retrofit.py MODEL --text held_out.jsonl [--tokens 4096] [--only mudd mhc] [--out build/retrofit]

MODEL is the folder of a Llama (for a GGUF file, the folder that `transformer2 convert` dequantised it to). For every
preset, in float32 and bfloat16: the largest difference of logits to the source over the first --tokens tokens of the
text, in rows of 512, the perplexity on them, and the largest difference on a left-padded batch and over cached
decoding. Writes OUT.json and OUT.md.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache

from transformer2.configs import names, preset_variants
from transformer2.conversion import convert
from transformer2.training.data import read_documents
from transformer2.training.loading import load_tokenizer

ROW = 512
PRESETS = [f"{name}-135m" for name in (*names("residual"), "standard+short_swa", "standard+canon", "ddl+short_swa")]


def rows_of(folder: Path, text: Path, count: int) -> list[Tensor]:
    """The first `count` tokens of a text, in rows [1, 512]."""
    tokenizer, ids = load_tokenizer(folder), []
    for document in read_documents(text):
        ids += tokenizer(document)["input_ids"]
        if len(ids) >= count:
            return [torch.tensor([ids[start : start + ROW]]) for start in range(0, count, ROW)]
    raise SystemExit(f"{text} holds {len(ids)} tokens, fewer than --tokens {count}.")


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Two rows of 100 and 77 tokens, the shorter one padded on the left."""
    ids = torch.cat([rows[0][:, :100], rows[1][:, :100]])
    mask = torch.ones_like(ids)
    mask[1, :23] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def outputs(model: Any, rows: list[Tensor]) -> dict[str, list[Tensor]]:
    """Logits of every probe."""
    cache, decoded = DynamicCache(config=model.config), []
    for start, stop in ((0, 40), *((position, position + 1) for position in range(40, 56))):
        decoded.append(model(rows[0][:, start:stop], cache=cache, use_cache=True).logits)
    batch = padded(rows)
    return {
        "text": [model(row, use_cache=False).logits for row in rows],
        "padded": [model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]],
        "cached": decoded,
    }


def perplexity(rows: list[Tensor], logits: list[Tensor]) -> float:
    losses = [
        torch.nn.functional.cross_entropy(predicted[0, :-1].float(), row[0, 1:], reduction="sum").item()
        for row, predicted in zip(rows, logits, strict=True)
    ]
    return math.exp(sum(losses) / (len(rows) * (ROW - 1)))


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def table(figures: list[dict[str, Any]]) -> str:
    columns = ["variant", "type", "new parameters", "max abs diff", "padded", "cached", "largest logit", "perplexity"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in figures:
        cells = [row["variant"], row["dtype"], f"{row['new_parameters']:,}"]
        cells += [f"{row[name]:.3g}" for name in ("text", "padded", "cached", "largest_logit")]
        lines.append("| " + " | ".join([*cells, f"{row['perplexity']:.6f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="+", choices=PRESETS, metavar="PRESET")
    parser.add_argument("--out", type=Path, default=Path("build/retrofit"))
    options = parser.parse_args()
    rows = rows_of(options.model, options.text, max(ROW * 2, options.tokens // ROW * ROW))
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    source, figures = {}, []
    for name, dtype in dtypes.items():
        source[name] = outputs(AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval(), rows)
        zeros = {"text": 0.0, "padded": 0.0, "cached": 0.0, "new_parameters": 0}
        largest = max(logits.abs().max().item() for logits in source[name]["text"])
        scores = {"perplexity": perplexity(rows, source[name]["text"]), "largest_logit": largest}
        figures.append({"variant": "source", "dtype": name, **zeros, **scores})
    for preset in tqdm(options.only or PRESETS, disable=None):
        with tempfile.TemporaryDirectory() as folder:
            report = convert(options.model, Path(folder) / "out", **preset_variants(preset), verify="L0")
            for name, dtype in dtypes.items():
                ours = outputs(AutoModelForCausalLM.from_pretrained(report["output"], dtype=dtype).eval(), rows)
                row = {kind: difference(ours[kind], source[name][kind]) for kind in ours}
                row["perplexity"] = perplexity(rows, ours["text"])
                row["largest_logit"] = max(logits.abs().max().item() for logits in ours["text"])
                row["new_parameters"] = report["new_parameters"]
                figures.append({"variant": preset, "dtype": name, **row})
        write(figures, options.out)  # so far, in case the rest is interrupted
    print(table(figures))
    print(f"Written: {options.out}.json and .md")


def write(figures: list[dict[str, Any]], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(figures, indent=2))
    out.with_suffix(".md").write_text(table(figures) + "\n")


if __name__ == "__main__":
    main()
