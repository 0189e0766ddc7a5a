"""Seconds and peak memory of conversions, against loading and saving with transformers.

    python benchmarks/conversion.py [--gigabytes 2 ...] [--model LLAMA_FOLDER] [--prove] [--out build/conversion]

Makes random Llamas of the given sizes in bfloat16, in one shard and in many, and runs every step in a process of its
own: plan, convert by links and by copies (level L0), verify the bytes (L1) and, with --prove, the logits layer by
layer (L2). The peer is LlamaForCausalLM.from_pretrained and save_pretrained. Seconds are those after imports, which
are the same for all; memory is the peak of the resident set beyond imports. Files are in the page cache, as far as it
reaches: what is measured is the work, not the disk. Writes OUT.json and OUT.md; the models go into a temporary folder
beside OUT and are removed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from transformer2.conversion.llama_sources import llama_shapes
from transformer2.conversion.shards import Piece, to_bytes, write_shard

SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
LAYER_BYTES, OTHER_BYTES = 88e6, 262e6  # in bfloat16, with this vocabulary
MANY = 16

STEP = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformer2.conversion import convert, plan, verify

def memory():  # getrusage would start from the peak of the process that started this one
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

source, output, step = sys.argv[1:]
floor, start = memory(), time.perf_counter()
if step == "peer":
    LlamaForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(output)
elif step == "plan":
    assert plan(source, residual="ddl")["possible"]
elif step in ("link", "copy"):
    convert(source, output, residual="ddl", verify="L0", materialize=step)
else:
    level, _, by_layer = step.partition(" ")
    result = verify(source, output, level, stream_layers=bool(by_layer), fresh_process=False)
    assert result["passed"], result["failures"]
print(json.dumps({"seconds": time.perf_counter() - start, "mebibytes": memory() - floor}))
"""


class Random:
    """The bytes of a random tensor, made when they are asked for."""

    def __init__(self, shape: tuple[int, ...], seed: int):
        self.shape, self.seed = shape, seed

    def __iter__(self) -> Iterator[bytes]:
        generator = torch.Generator().manual_seed(self.seed)
        yield to_bytes((0.02 * torch.randn(self.shape, generator=generator)).bfloat16())


def make_llama(folder: Path, gigabytes: float, shards: int) -> None:
    """A random Llama of about so many 10^9 bytes."""
    from transformers import LlamaConfig

    layers = max(1, round((1e9 * gigabytes - OTHER_BYTES) / LAYER_BYTES))
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, vocab_size=32000, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    pieces = [
        Piece(name, "BF16", shape, Random(shape, seed))
        for seed, (name, shape) in enumerate(llama_shapes(config).items())
    ]
    if shards == 1:
        write_shard(folder / "model.safetensors", pieces)
        return
    weight_map = {}
    for number in range(shards):
        part = pieces[number * len(pieces) // shards : (number + 1) * len(pieces) // shards]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / name, part)
        weight_map |= dict.fromkeys((piece.name for piece in part), name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measure(source: Path, output: Path, step: str) -> dict[str, float]:
    """One step in a fresh process."""
    command = [sys.executable, "-c", STEP, str(source), str(output), step]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{step} of {source.name} failed: {run.stderr.strip().splitlines()[-1]}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="*", default=[2.0])
    parser.add_argument("--model", type=Path, help="a Llama to measure as well")
    parser.add_argument("--prove", action="store_true", help="also level L2, layer by layer: minutes per model")
    parser.add_argument("--out", type=Path, default=Path("build/conversion"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    steps = [
        "plan",
        "peer",
        "link",
        "L1 of links",
        "copy",
        "L1 of copies",
        *(["L2 by layer"] if arguments.prove else []),
    ]
    models: list[tuple[str, float | None, int]] = [
        (f"{size:g} GB, {shards} shard{'s' * (shards > 1)}", size, shards)
        for size in arguments.gigabytes
        for shards in (1, MANY)
    ]
    if arguments.model:
        models.append((arguments.model.resolve().name, None, 0))
    rows: list[dict] = []
    with tqdm(total=len(models) * len(steps)) as bar:
        for name, size, shards in models:
            with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
                source = Path(folder) / "llama"
                if size is None:  # a copy: links take the write permission from their source
                    shutil.copytree(arguments.model, source)
                else:
                    make_llama(source, size, shards)
                for step in steps:
                    bar.set_description(f"{name}: {step}")
                    made = {"peer": "peer", "link": "linked", "L1 of links": "linked"}.get(step, "copied")
                    figures = measure(source, Path(folder) / made, step.partition(" of")[0])
                    rows.append({"model": name, "step": step, **figures})
                    bar.update()
                    write(arguments.out, rows)


def write(out: Path, rows: list[dict]) -> None:
    out.with_suffix(".json").write_text(json.dumps(rows, indent=2) + "\n")
    lines = ["| model | step | seconds | MiB |", "|---|---|---|---|"]
    lines += [f"| {r['model']} | {r['step']} | {r['seconds']:.2f} | {r['mebibytes']:,.0f} |" for r in rows]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
