"""L2: the converted model computes what stock Llama computes, bit for bit, in float32 and in the stored type."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transformer2 import Transformer2ForCausalLM
from transformer2.conversion.families import FAMILIES, class_named
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.probes import compare, first_difference, hidden_states, probe_inputs, run_probe


def check_logits(source: LlamaSource, output: Path, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Probe name -> figures of the comparison. The two models are in memory one after the other, never together."""
    probes = probe_inputs(source.config)
    model = load_llama(source, dtype)
    expected = {name: run_probe(model, name, inputs) for name, inputs in probes.items()}
    del model
    model, loading = load_converted(output, dtype)
    results = {name: compare(expected[name], run_probe(model, name, inputs)) for name, inputs in probes.items()}
    del expected
    results["loading"] = {"bit_equal": not loading, "problems": loading}

    differing = [name for name in probes if not results[name]["bit_equal"]]
    if differing:
        inputs = probes[differing[0]]
        actual = hidden_states(model, inputs)
        del model
        place = first_difference(hidden_states(load_llama(source, dtype), inputs), actual)
        for name in differing:
            results[name]["first_difference"] = place
    return results


def check_fresh_process(source: LlamaSource, output: Path, allowed: float = 0.0) -> dict[str, Any]:
    """Load `output` by `trust_remote_code`, where our package is blocked, and compare with stock Llama's logits.

    allowed: how far they may differ, as a share of the largest.
    Raises nothing: whatever goes wrong over there is part of the result.
    """
    from safetensors.torch import save_file

    probes = probe_inputs(source.config)
    model = load_llama(source, torch.float32)
    names = ("short", "left_padded", "cached")
    tensors: dict[str, Tensor] = {f"{name}.logits": run_probe(model, name, probes[name]) for name in names}
    del model
    for name in names:
        tensors.update({f"{name}.{key}": value for key, value in probes[name].items()})
    script = (Path(__file__).parent / "fresh_process.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="transformer2-verify-") as folder:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(folder) / "probes.safetensors")
        environment = {**os.environ, "HF_MODULES_CACHE": str(Path(folder) / "modules"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", script, str(output.absolute()), str(Path(folder) / "probes.safetensors")]
        run = subprocess.run(
            [*command, str(torch.get_num_threads()), str(allowed)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    lines = run.stdout.strip().splitlines()
    if run.returncode != 0 or not lines:
        error = (run.stderr.strip().splitlines() or ["no message"])[-1].replace(str(output.absolute()), output.name)
        return {"bit_equal": False, "problems": [f"loading without the package failed: {error}"]}
    return json.loads(lines[-1])


def load_llama(source: LlamaSource, dtype: torch.dtype) -> nn.Module:
    """The source in its own class, such as stock Llama. The config says the truth about tied embeddings."""
    model_class = class_named(FAMILIES[source.config.model_type].model)
    with quiet_library():
        stored = source.dtype if source.cast else dtype
        model = model_class.from_pretrained(source.checkpoint.folder, config=source.config, dtype=stored)
        # Rotary frequencies are float32 in any type, which `to` would not know.
        return (model if stored == dtype else model.to(dtype)).eval()


def load_converted(output: Path, dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
    """The converted model, and what the library had to complain about while loading it."""
    with quiet_library():
        model, info = Transformer2ForCausalLM.from_pretrained(output, dtype=dtype, output_loading_info=True)
    problems = [f"{kind}: {', '.join(map(str, sorted(map(str, names))))}" for kind, names in info.items() if names]
    return model.eval(), problems


@contextlib.contextmanager
def quiet_library() -> Iterator[None]:
    """No progress bars and load reports of transformers meanwhile: loading is a detail of a check here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
