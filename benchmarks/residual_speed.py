"""Forward and forward + backward time of our model relative to LlamaForCausalLM, side by side in one run.

    python benchmarks/residual_speed.py [--layers 4] [--hidden 768] [--tokens 256] [--rounds 9] [--json]

Each round times every model once, in turn, so that whatever else the machine does hits all alike; the figure is
the median over rounds of the ratio to Llama in the same round. CPU seconds of this process, one thread.
"""

import argparse
import json
import statistics
import time

import torch
from steady import keep_memory
from transformers import LlamaConfig, LlamaForCausalLM

from transformer2 import Transformer2Config, Transformer2ForCausalLM

VARIANTS = {
    "standard": "standard",
    "ddl d_v=1": {"type": "ddl"},
    "ddl d_v=1 identity": {"type": "ddl", "form": "identity"},
    "ddl d_v=4 CC": {"type": "ddl", "value_channels": 4},
    "ddl d_v=4 CC EC": {"type": "ddl", "value_channels": 4, "expand": True},
    "ddl d_v=4 TC": {"type": "ddl", "value_channels": 4, "compress": "tokens"},
    "ddl d_v=4 TC EC": {"type": "ddl", "value_channels": 4, "compress": "tokens", "expand": True},
    "depth short_swa K=4": {"type": "short_swa"},
}


def seconds(model, ids: torch.Tensor, backward: bool) -> float:
    """CPU seconds of one pass."""
    start = time.process_time()
    if backward:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)
    else:
        with torch.no_grad():
            model(ids, use_cache=False)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"layers": 4, "hidden": 768, "tokens": 256, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 2048,
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 8 // 3,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
        "num_key_value_heads": options.hidden // 64,
    }
    models = {"llama": LlamaForCausalLM(LlamaConfig(**sizes)).train()}
    for name, residual in VARIANTS.items():
        models[name] = Transformer2ForCausalLM(Transformer2Config(**sizes, residual=residual)).train()
    ids = torch.randint(0, 2048, (1, options.tokens))
    figures = {}
    for backward in (False, True):
        for model in models.values():
            seconds(model, ids, backward)  # warm up
        rounds = [{n: seconds(m, ids, backward) for n, m in models.items()} for _ in range(options.rounds)]
        kind = "forward + backward" if backward else "forward"
        figures[kind] = {n: statistics.median(r[n] / r["llama"] for r in rounds) for n in models}
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"{'relative to LlamaForCausalLM':<32}{'forward':>10}{'forward + backward':>22}")
    for name in models:
        print(f"{name:<32}{figures['forward'][name]:>10.3f}{figures['forward + backward'][name]:>22.3f}")


if __name__ == "__main__":
    main()
