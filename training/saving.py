"""From a trained model to a checkpoint folder that appears as a whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from transformer2.conversion.files import plain_disk_errors
from transformer2.conversion.publishing import settle_interrupted_swap, swap_in
from transformer2.errors import CheckFailed, MachineError, UserError
from transformer2.training.loading import tensor_files

# What a fine-tuned checkpoint takes over from its base, byte for byte. Not its card and not its verification report:
# they describe the base.
SIDE_FILES = (
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
    if output.is_symlink():
        raise UserError(f"The output {output} is a symbolic link: name the folder that it points to.")
    settle_interrupted_swap(output)
    if output.exists() and not output.is_dir():
        raise UserError(f"The output {output} is a file: name a folder.")
    if output.resolve() == source.resolve() or output.resolve() in source.resolve().parents:
        raise UserError(f"The output {output} holds the model to start from: name another folder.")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise UserError(
            f"The output folder {output} is not empty: set overwrite=true to replace it, or name another one."
        )
    parent = next(folder for folder in output.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"Cannot write into {parent}.")
    needed = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    if (free := shutil.disk_usage(parent).free) < needed:
        raise MachineError(
            f"The checkpoint needs {needed / 1e9:.1f} GB at {output}, and {free / 1e9:.1f} GB are free there."
        )


@contextlib.contextmanager
def published(output: Path) -> Iterator[Path]:
    """A new folder next to `output`, renamed to it on success (replacing an older one), removed on failure."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.parent / f".{output.name}.unfinished-{os.getpid()}"
    try:
        with plain_disk_errors(output.parent):
            unfinished.mkdir()
            yield unfinished
            swap_in(unfinished, output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
    """The name of a parameter in its source, where checkpoints of the headless model leave the first part out."""
    return name if name in known else name.removeprefix("model.")


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
