"""The files of a source that are neither weights nor code: tokenizer, chat template, generation config, licence."""

from pathlib import Path

from transformer2.conversion.sources import UNWANTED_SUFFIXES

REPLACED = {"config.json", "verification.json", "transformer2_conversion.json"}
RENAMED = {"README.md": "BASE_README.md"}  # it describes another model; kept for its licence and credits
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
        carried[RENAMED.get(name, name)] = file
    return carried


def _unwanted(name: str) -> bool:
    if name.endswith((".safetensors", ".index.json", *UNWANTED_SUFFIXES)):
        return True
    return name.startswith(TRAINING) and not name.endswith((".jinja", ".txt", ".md"))
