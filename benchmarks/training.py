"""Tokens per second and peak memory of fine-tuning on documents of ragged length, next to TRL's SFTTrainer.

    pip install trl
    python benchmarks/training.py [--steps 12] [--rounds 3] [--out build/training]

One random plain Llama, the same pre-tokenised documents (lengths log-normal, median 150, at most 512 tokens), the same
rows per optimiser step (8 of 512 tokens), AdamW, clipping and float32 on the CPU. Three settings, each in a process of
its own, in turns, so that whatever else the machine does meets all of them:

    transformer2  rows packed by best fit, documents isolated
    trl           one document per row, padded to the longest of its batch: documents are isolated
    trl packing   rows packed (best fit decreasing); without FlashAttention, documents in a row see each other

Counted are tokens that are not padding, in the optimiser steps after the first; memory is the peak of the resident set
beyond imports. Medians over the rounds. Writes OUT.json and OUT.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH, ROWS = 16_384, 512, 8
SETTINGS = ("transformer2", "trl", "trl packing")

WORKER = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def memory():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

setting, folder, steps, length, rows = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
times, tokens = [], []
if setting == "transformer2":
    from transformer2.training import train
    from transformer2.training.loop import Loop

    floor, begin = memory(), Loop._step
    def timed(self):
        before = self.counters.tokens
        begin(self)
        times.append(time.perf_counter())
        tokens.append(self.counters.tokens - before)
    Loop._step = timed
    train({
        "model": f"{folder}/model", "output": f"{folder}/out", "overwrite": True, "resume": False,
        "data": {"train": f"{folder}/data.jsonl", "sequence_length": length},
        "optimisation": {"train": "all", "steps": steps, "rows_per_step": rows, "rows_per_batch": rows,
                         "precision": "fp32", "schedule": "constant", "lr": {"pretrained": 1e-4}},
    })
else:
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    floor = memory()
    class Clock(TrainerCallback):
        def on_step_end(self, *arguments, **keywords):
            times.append(time.perf_counter())
            tokens.append(counted.pop())
    counted = []
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    def count(module, arguments, keywords):
        mask = keywords.get("attention_mask")
        counted[:] = [int(mask.sum()) if mask is not None else keywords["input_ids"].numel()]
    model.register_forward_pre_hook(count, with_kwargs=True)
    SFTTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
        train_dataset=load_dataset("json", data_files=f"{folder}/data.jsonl", split="train"),
        callbacks=[Clock()],
        args=SFTConfig(
            output_dir=f"{folder}/trl", max_steps=steps, per_device_train_batch_size=rows, max_length=length,
            packing=setting == "trl packing", learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.1,
            adam_beta2=0.95, max_grad_norm=1.0, bf16=False, fp16=False, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, seed=0,
        ),
    ).train()
assert len(times) == steps, times
print(json.dumps({
    "tokens_per_second": sum(tokens[1:]) / (times[-1] - times[0]),
    "tokens_per_step": sum(tokens[1:]) / len(tokens[1:]),
    "megabytes": memory() - floor,
}))
"""


def prepare(folder: Path, documents: int) -> int:
    """The model, its tokenizer and the data -> the number of parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    words = {name: i for i, name in enumerate(["<bos>", "<eos>", "<pad>", *(f"w{i}" for i in range(3, VOCABULARY))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder / "model")
    generator = np.random.default_rng(0)
    with (folder / "data.jsonl").open("w") as file:
        for size in np.clip(generator.lognormal(np.log(150), 0.8, documents), 8, LENGTH).astype(int):
            file.write(json.dumps({"input_ids": generator.integers(3, VOCABULARY, size).tolist()}) + "\n")
    return model.num_parameters()


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/training"))
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {setting: [] for setting in SETTINGS}
    with tempfile.TemporaryDirectory() as folder:
        parameters = prepare(Path(folder), documents=4 * ROWS * options.steps)
        for _ in tqdm(range(options.rounds), unit="round"):
            for setting in SETTINGS:
                command = [sys.executable, "-c", WORKER, setting, folder, options.steps, LENGTH, ROWS]
                done = subprocess.run([*map(str, command)], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"{setting} failed:\n{done.stderr[-3000:]}")
                found[setting].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        setting: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for setting, rows in found.items()
    }
    isolated = {True: "isolated", False: "see each other"}
    lines = [
        f"A Llama of {parameters:,} parameters, {options.steps} steps, {options.rounds} rounds, "
        f"{torch.get_num_threads()} threads.\n",
        "| setting | documents | tokens/s | of trl | tokens/step | MiB beyond imports |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for setting, row in medians.items():
        ratio = row["tokens_per_second"] / medians["trl"]["tokens_per_second"]
        lines.append(
            f"| {setting} | {isolated[setting != 'trl packing']} | {row['tokens_per_second']:.0f} | {ratio:.2f} | "
            f"{row['tokens_per_step']:.0f} | {row['megabytes']:.0f} |"
        )
    print("\n".join(lines))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps({"rounds": found, "medians": medians}, indent=2) + "\n")
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
