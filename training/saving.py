"""From a trained model to a checkpoint folder that appears as a whole or not at all."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from transformer2.conversion.publishing import require_free_name
from transformer2.errors import CheckFailed, MachineError, UserError
from transformer2.training.loading import tensor_files

# What a fine-tuned checkpoint takes over from its base, byte for byte: among it where the base came from. Not its card
# and not its verification report: they describe the base alone.
SIDE_FILES = (
    "transformer2_conversion.json",
    "dequantisation.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


def check_output(output: Path, source: Path, overwrite: bool) -> None:
    """Raise UserError where `output` may not be written, MachineError where the disk is too full for another copy."""
    require_free_name(output, overwrite)
    if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
        raise UserError(f"The output {output} holds the model to start from: name another folder.")
    parent = next(folder for folder in output.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"Cannot write into {parent}.")
    needed = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    if (free := shutil.disk_usage(parent).free) < needed:
        raise MachineError(
            f"The checkpoint needs {needed / 1e6:,.1f} MB at {output}, and {free / 1e6:,.1f} MB are free there: free "
            "some space, or name another disk."
        )


def write_checkpoint(model, folder: Path, source: Path, dtypes: dict[str, torch.dtype]) -> None:
    """Model (in the types that the source stores, which changes it), tokenizer and generation settings.

    dtypes: of the source's tensors, by name.
    """
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[source_name(name, dtypes)])
    model.config.use_cache = True
    model.save_pretrained(folder)
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def source_name(name: str, known: dict[str, Any]) -> str:
    """The name of a parameter in its source.

    Checkpoints of the headless model leave the first part out, and tied embeddings may be stored as the head.
    """
    other = {"model.embed_tokens.weight": "lm_head.weight", "lm_head.weight": "model.embed_tokens.weight"}
    return next(n for n in (name, name.removeprefix("model."), other.get(name, name)) if n in known)


def check_frozen(folder: Path, source: Path, frozen: list[str]) -> None:
    """Raise CheckFailed unless every frozen tensor of the new checkpoint has the bytes of the source."""
    written, original = tensor_files(folder), tensor_files(source)
    for name in frozen:
        old_name = source_name(name, original)
        new, old = _read(written[name], name), _read(original[old_name], old_name)
        same = new.dtype == old.dtype and new.shape == old.shape
        if not same or not torch.equal(new.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)):
            raise CheckFailed(f"The frozen tensor {name} differs from its source: nothing was written.")


def _read(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as tensors:
        return tensors.get_tensor(name)
