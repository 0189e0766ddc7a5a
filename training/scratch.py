"""A new model from a preset, with random weights: where training from scratch starts."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import transformer2  # noqa: F401  registers the model family
from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.configs import preset
from transformer2.conversion.paths import check_seed, plain_os_errors, user_path
from transformer2.conversion.publishing import partial_folder, publish
from transformer2.errors import UserError
from transformer2.training.loading import load_tokenizer

VARIANTS = ("residual", "local_mixer", "model_type", "architectures", "auto_map")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")


@plain_os_errors()
def start_from_scratch(
    name: str,
    output: str | Path,
    tokenizer: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    overwrite: bool = False,
    overrides: Mapping[str, Any] | None = None,
    paired: bool = False,
) -> dict[str, Any]:
    """Write the randomly initialised model of a preset, with the tokenizer of another model folder, to `output`.

    The vocabulary is the tokenizer's. overrides: fields of the configuration to change. paired: what a plain model has
    as well starts as in the plain model of this seed, so that models of one seed differ in their variants alone.
    Raises UserError for an unknown preset, a folder without a tokenizer, and an
    output that exists.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"Unknown dtype {dtype!r}; choose one of: float32, bfloat16, float16.")
    check_seed(seed)
    source = user_path(tokenizer)
    if not source.is_dir():
        raise UserError(f"There is no folder {tokenizer} to take the tokenizer from.")
    words = load_tokenizer(source)
    special = {key: getattr(words, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    try:
        config = preset(name, **{"vocab_size": len(words), **special, **(overrides or {})})
    except ValueError as error:
        raise UserError(str(error)) from error
    output = user_path(output)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not `.to(dtype)`: gates and weights of residuals stay float32.
        model = Transformer2ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
        if paired:
            torch.manual_seed(seed)
            plain = Transformer2Config(**{k: v for k, v in config.to_dict().items() if k not in VARIANTS})
            weights = Transformer2ForCausalLM._from_config(plain, dtype=getattr(torch, dtype)).state_dict()
            own = model.state_dict()
            alike = {name: w for name, w in weights.items() if name in own and own[name].shape == w.shape}
            model.load_state_dict(alike, strict=False)
    with partial_folder(output, overwrite=overwrite) as partial:
        model.save_pretrained(partial.path)
        for pattern in TOKENIZER_FILES:
            for file in source.glob(pattern):
                shutil.copyfile(file, partial.path / file.name)
        made = {"preset": name, "seed": seed}
        (partial.path / "transformer2_preset.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        publish(partial, output)
    return {"output": str(output), "parameters": model.num_parameters(), **made}
