"""Who is told about a run: a file with one JSON object per line always, others through Accelerate."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

from transformer2.errors import MachineError
from transformer2.training.schema import TrackingSettings

LOG = "log.jsonl"
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


class JsonLines(GeneralTracker):
    """One JSON object per line: {"step": n, ...}. The file is made with its first line."""

    name = "jsonl"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, file: Path):
        super().__init__()
        self.file = file

    @property
    def tracker(self) -> Path:
        return self.file

    def store_init_configuration(self, values: dict) -> None:
        """The report has the settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **keywords: Any) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, **values}) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop lines of later steps, which a resumed run does again, and a torn last line."""
        if not self.file.is_file():
            return
        kept = []
        for line in self.file.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        self.file.write_text("".join(kept), encoding="utf-8")


def check_trackers(settings: TrackingSettings) -> None:
    """Raise MachineError for a tracker whose package is not installed."""
    for name in settings.trackers:
        if not any(importlib.util.find_spec(package) for package in PACKAGES[name]):
            raise MachineError(f"tracking.trackers: {name} is not installed: pip install {name}.")


def start_trackers(
    accelerator: Accelerator,
    settings: TrackingSettings,
    output: Path,
    log: Path,
    config: dict[str, Any],
    run_id: str,
    step: int,
) -> None:
    """Begin, or go on after `step`. run_id: the same for a run and for what resumes it, so that W&B joins them."""
    lines = JsonLines(log)
    if accelerator.is_main_process:
        lines.forget_after(step)
    accelerator.log_with = [lines, *settings.trackers]
    name = settings.name or output.name
    if "tensorboard" in settings.trackers:
        accelerator.project_configuration.logging_dir = str(Path(settings.folder) / name)
    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": name, "id": run_id, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow"},
        "tensorboard": {"purge_step": step + 1} if step else {},
    }
    accelerator.init_trackers(
        settings.project, _flat(config), {key: options[key] for key in settings.trackers if options[key]}
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}, with values that every tracker takes."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, int | float | str | bool) else json.dumps(value)
    return flat
