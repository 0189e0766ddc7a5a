"""The files of a source that are neither weights nor code: tokenizer, chat template, generation config, licence."""

import json
import os
from pathlib import Path

from transformer2.conversion.sources import UNWANTED_SUFFIXES
from transformer2.errors import UserError

REPLACED = {"config.json", "verification.json", "transformer2_conversion.json"}
RENAMED = {"README.md": "BASE_README.md"}  # it describes another model; kept for its licence and credits
LARGE = 4 * 2**20
TRAINING = (
    "optimizer",
    "scheduler",
    "trainer_state",
    "training_args",
    "training_report",
    "rng_state",
    "scaler",
    "consolidated",
)
TRAINING_FOLDERS = ("checkpoint-", "global_step", "runs", "wandb", "original", "onnx", "logs")


def side_files(folder: Path, taken: set[str]) -> dict[str, Path]:
    """Names in the output -> files of the source to carry over. `taken` names are written by the conversion itself."""
    carried: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        relative = file.relative_to(folder)
        if not file.is_file() or any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            continue
        if relative.parts[0].startswith(TRAINING_FOLDERS) and len(relative.parts) > 1:
            continue
        name = relative.as_posix()
        if name in REPLACED | taken or _unwanted(file.name):
            continue
        if file.suffix == ".json":
            _check_json(file)  # or the output could not be loaded
        carried[RENAMED.get(name, name)] = file
    return carried


def _check_json(file: Path) -> None:
    """Raise UserError for broken JSON; of large files, a whole tokenizer's, only both ends are looked at."""
    with open(file, "rb") as stream:
        if file.stat().st_size <= LARGE:
            try:
                json.loads(stream.read())
                return
            except ValueError:
                pass
        else:
            first = stream.read(64).lstrip()[:1]
            stream.seek(-64, os.SEEK_END)
            if first + stream.read().rstrip()[-1:] in (b"{}", b"[]"):
                return
    raise UserError(f"{file} is not valid JSON; download it again, or delete it if the model does not need it.")


def _unwanted(name: str) -> bool:
    if name.endswith((".safetensors", ".index.json", *UNWANTED_SUFFIXES)):
        return True
    return name.startswith(TRAINING) and not name.endswith((".jinja", ".txt", ".md"))
