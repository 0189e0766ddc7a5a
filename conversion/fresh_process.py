"""Run as a script by `logits.py`: a converted folder must load with transformers alone. Prints one line of JSON.

Arguments: the folder, a safetensors file with probes and expected logits, the number of threads, and how far logits
may differ, as a share of the largest. `transformer2` cannot be imported in here, whether it is installed or not.
"""

import json
import sys


class _Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer2", "transformer2_cli"):
            raise ImportError(f"{name} is blocked here: the checkpoint has to load without it")


def _main(folder: str, probe_file: str, threads: str, allowed: str) -> None:
    sys.meta_path.insert(0, _Blocked())
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.set_num_threads(int(threads))
    torch.set_grad_enabled(False)
    probes = load_file(probe_file)
    problems: list[str] = []

    def same(name: str, logits) -> None:
        mask = probes.get(f"{name}.attention_mask")
        logits = logits.flatten(0, 1) if mask is None else logits[mask.bool()]
        expected = probes[f"{name}.logits"]
        difference = (logits - expected).abs().max().item()
        if not difference <= float(allowed) * expected.abs().max().item():  # NaN is no agreement
            problems.append(f"{label} on the probe {name}: logits differ by {difference:.3g}")

    def inputs(name: str) -> dict:
        keys = ("input_ids", "attention_mask")
        return {key: probes[f"{name}.{key}"] for key in keys if f"{name}.{key}" in probes}

    if AutoConfig.from_pretrained(folder, trust_remote_code=True).model_type != "transformer2":
        problems.append("AutoConfig: another model type")
    label = "AutoModelForCausalLM"
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    problems += [f"{label}: {kind} {sorted(map(str, names))}" for kind, names in info.items() if names]
    model.eval()
    same("short", model(**inputs("short"), use_cache=False).logits)
    same("left_padded", model(**inputs("left_padded"), use_cache=False).logits)
    ids = probes["cached.input_ids"]
    prefill = max(1, ids.shape[1] - 6)
    output = model(input_ids=ids[:, :prefill], use_cache=True)
    field = "cache" if "cache" in output else "past_key_values"
    logits = [output.logits]
    for step in range(prefill, ids.shape[1]):
        output = model(input_ids=ids[:, step : step + 1], use_cache=True, **{field: output[field]})
        logits.append(output.logits)
    same("cached", torch.cat(logits, dim=1))
    head = model.lm_head
    del model, output

    label = "AutoModel"
    base = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    same("short", head(base(**inputs("short"), use_cache=False).last_hidden_state))
    print(json.dumps({"bit_equal": not problems, "problems": problems}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
