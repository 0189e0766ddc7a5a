"""More sections of the settings: groups of parameters, LoRA, checkpoints and trackers, see `training.settings`."""

from dataclasses import dataclass, field
from typing import Literal

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class ParameterGroup:
    """Other rates for some parameters.

    match: a regular expression; the group has the trained parameters in whose name it is found, and which no group
        before it has. One that finds none is an error.
    lr: peak learning rate; null: that of the parameter's kind.
    weight_decay: null: as for every parameter of its kind.
    """

    match: str = ""
    lr: float | None = None
    weight_decay: float | None = None


@dataclass
class LoraSettings:
    """Low-rank adapters on the pretrained projections, where `train` is "lora" (Hu et al. 2021, arXiv:2106.09685).

    r: rank. alpha: the adapters' output is multiplied by alpha / r. dropout: of their inputs.
    targets: the projections of attention and MLP that get one; never those of residuals and local mixers, which are
        trained as a whole.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: list[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]] = field(
        default_factory=lambda: list(PROJECTIONS)
    )


@dataclass
class CheckpointSettings:
    """When the state of the run is saved, in the folder OUTPUT-run, so that the same command goes on from there.

    every: after every so many steps; null: not by steps.
    minutes: when this much time has passed since the last one; null: not by time.
    keep: how many of the newest stay.
    A run that gets SIGTERM (or SIGUSR1) saves in any case. A run that has succeeded removes them.
    """

    every: int | None = None
    minutes: float | None = None
    keep: int = 2


@dataclass
class TrackingSettings:
    """Who is told of every step, besides the file log.jsonl, which there is always.

    trackers: any of tensorboard, wandb, trackio; each needs its package.
    project, name: under which the run is shown; name null: that of the output folder.
    folder: where TensorBoard writes.
    peak_tflops: of one device, for the model FLOPs utilisation; null: known for common GPUs, else none is reported.
    """

    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    project: str = "transformer2"
    name: str | None = None
    folder: str = "runs"
    peak_tflops: float | None = None
