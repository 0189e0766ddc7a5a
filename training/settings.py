"""The settings of a training run: what a YAML file may say, what each key means, and a strict reader for it.

The dataclasses below are the schema. A key that is not a field is an error with a suggestion, so that a misspelt
setting can never be ignored in silence.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from transformer2.conversion.paths import check_seed
from transformer2.errors import UserError
from transformer2.training.schema import CheckpointSettings, LoraSettings, ParameterGroup, TrackingSettings
from transformer2.training.strict import build, override_with, read_yaml


@dataclass
class DataSettings:
    """Where the text comes from, and how it becomes rows.

    train: a file (.txt, .md, .jsonl, .json, .parquet), a folder of such files, a saved or hub data set, or a list.
    eval: the same, for held-out text.
    eval_tokens: evaluate on at most this many tokens; without `eval`, hold that many of `train` back.
    eval_fraction: without `eval`, hold this share of the training tokens back. None of the three: no evaluation.
    text_column: the column with the text (not for text files).
    separator: the string between documents of a text file; null: a text file is one document.
    split: the split of a hub data set or data set folder.
    name: the configuration of a hub data set that has several.
    kind: what the examples are. "text"; "prompt_completion" (columns prompt and completion, of which the completion is
        learned); "chat" (a column messages, of which the assistant's turns are learned); "tokens" (a column input_ids,
        and labels where not all count); null: as the columns say.
    chat_template: a file with the template of chats, or a folder of a model that has one; null: the tokenizer's own.
    packing: "best_fit" (no document that fits into a row is cut) or "concatenated" (rows without a gap); documents
        never see each other in either.
    streaming: read tables bit by bit while training, rather than before; needs `eval` for an evaluation.
    sequence_length: tokens per row, at least 2.
    hold_out_seed: which documents are held back; null: as `optimisation.seed` says.
    """

    train: str | list[str] = ""
    eval: str | list[str] | None = None
    eval_tokens: int | None = None
    eval_fraction: float | None = None
    text_column: str = "text"
    separator: str | None = None
    split: str = "train"
    name: str | None = None
    kind: Literal["text", "prompt_completion", "chat", "tokens"] | None = None
    chat_template: str | None = None
    packing: Literal["best_fit", "concatenated"] = "best_fit"
    streaming: bool = False
    sequence_length: int = 1024
    hold_out_seed: int | None = None


@dataclass
class LearningRates:
    """Peak learning rates.

    lora: of the adapters, where `train` is "lora".
    new: of residuals and local mixers. The default suits the matrices of ShortSWA, which diverged at 2e-3; DDL has few
        parameters and wants 1e-3 to 3e-3 (it diverged at 2e-2).
    pretrained: of everything else, where `train` is "all".
    """

    new: float = 3e-4
    pretrained: float = 2e-5
    lora: float = 2e-4


@dataclass
class OptimisationSettings:
    """What is trained, and how.

    train: "new", the residuals and local mixers only; "lora", these and low-rank adapters on the pretrained
        projections; or "all".
    frozen: regular expressions; parameters whose name one of them is found in are not trained, whatever `train` says.
    steps: optimiser steps.
    tokens: instead of `steps`, such as 20M: as many steps as have this many tokens where all rows are full.
    rows_per_step: rows of `sequence_length` tokens in one optimiser step, over all processes.
    rows_per_batch: rows in one forward pass of one process; the rest of a step is accumulated.
    lr: peak learning rates, see `LearningRates`.
    groups: other rates for some parameters, by regular expressions, see `ParameterGroup`.
    lora: see `LoraSettings`.
    anneal: parameters by the last part of their name, and the value that they move to in a straight line over the
        steps: {erase: 1, carry: 0} ends a DDL retrofit in the published rule. They are not trained from there on.
    schedule: after the warm-up, "cosine" decay to `min_lr_ratio` times the peak, "constant", or "wsd": constant, then
        over the last share `decay` of the steps down to `min_lr_ratio` in a straight line.
    warmup: share of the steps over which the learning rate rises linearly.
    decay: share of the steps over which "wsd" falls.
    min_lr_ratio: learning rate at the end of "cosine" and "wsd", as a share of the peak.
    weight_decay: of the weights of linear layers and embeddings, except gates; everything else has none.
    betas: of AdamW.
    clip: largest norm of the gradient; null: no clipping.
    precision: "bf16" (autocast, trained parameters in float32), "fp32", or "auto", see `training.precision`.
    gradient_checkpointing: recompute each layer in the backward pass: less memory, about a third more time.
    seed: of the order of the rows, of the split and of dropout.
    deterministic: only algorithms that give the same bits every time; slower on a GPU.
    on_nan: what to do where a loss or gradient is not finite: "stop", or "skip" the step, ten in a row at most. The
        rows of the step are written to the folder OUTPUT-run in either case.
    """

    train: Literal["new", "lora", "all"] = "new"
    frozen: list[str] = field(default_factory=list)
    steps: int = 100
    tokens: int | str | None = None
    rows_per_step: int = 8
    rows_per_batch: int = 1
    lr: LearningRates = field(default_factory=LearningRates)
    groups: list[ParameterGroup] = field(default_factory=list)
    lora: LoraSettings = field(default_factory=LoraSettings)
    anneal: dict[str, float] = field(default_factory=dict)
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    warmup: float = 0.05
    decay: float = 0.2
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float | None = 1.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0
    deterministic: bool = False
    on_nan: Literal["stop", "skip"] = "stop"


@dataclass
class LossSettings:
    """What is minimised besides the cross-entropy.

    kl: weight of the divergence KL(original || model) per token, which keeps a retrofit near the pretrained model; 0:
        none. The original is the network itself without its new operators, so this costs a forward pass, no memory for
        a second model, and does not go with `optimisation.train: all`.
    temperature: at which the two distributions are compared.
    """

    kl: float = 0.0
    temperature: float = 1.0


@dataclass
class EvaluationSettings:
    """When the held-out text is evaluated, besides before the first step, and after the last one of every stage.

    every: also after every so many steps; null: not.
    rows_per_batch: rows in one forward pass.
    patience: end a stage after so many evaluations in a row that are no better than the best of the stage; null: not.
    min_gain: better means by more than this, in nats per token.
    keep_best: the result is the model of the best evaluation rather than the last.
    """

    every: int | None = None
    rows_per_batch: int = 1
    patience: int | None = None
    min_gain: float = 0.0
    keep_best: bool = False


@dataclass
class Settings:
    """One training run.

    model: the checkpoint to start from: a folder, or a hub name. Or random weights: {preset: ddl-135m, tokenizer:
        path/to/a/model}, with fields of the configuration to change, such as num_hidden_layers, besides.
    output: the folder to write; it appears only when the run has succeeded.
    overwrite: replace an output folder that is there already.
    resume: go on from the newest complete checkpoint of this output, where there is one; false: start anew.
    stages: parts of the run, one after another, each with a `name`, `steps` or `tokens`, and what differs in it from
        `optimisation`; empty: the run has one stage, which is `optimisation`.
    control: train the plain model, too, on the same data, order and steps, and report whether the variant helped.
    nulls: with a DDL retrofit, also train it without a part: "write_only" (nothing is ever erased) or "gate_only"
        (nothing is erased, and sublayers write their output alone).
    variants: instead of the model's own, train each of these RESIDUAL[+LOCAL_MIXER] presets on it.
    seeds: train everything once for each of these seeds; empty: for `optimisation.seed` alone.
    data, optimisation, loss, evaluation, checkpoints, tracking: see the classes of these names.
    """

    model: str | dict[str, Any] = ""
    output: str = ""
    overwrite: bool = False
    resume: bool = True
    control: bool = False
    nulls: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    data: DataSettings = field(default_factory=DataSettings)
    optimisation: OptimisationSettings = field(default_factory=OptimisationSettings)
    stages: list[dict[str, Any]] = field(default_factory=list)
    loss: LossSettings = field(default_factory=LossSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)


def load_settings(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Settings:
    """A YAML file (or a mapping of the same shape) and overrides like "optimisation.lr.new=1e-3" -> checked settings.

    Raises UserError for a file that is not there or not YAML, an unknown key, a value of the wrong type, or values
    that make no sense together.
    """
    tree = dict(source) if isinstance(source, Mapping) else read_yaml(Path(source))
    for override in overrides:
        tree = override_with(tree, override)
    settings = build(Settings, tree, "")
    check(settings)
    return settings


def to_yaml(settings: Settings) -> str:
    """The settings with every default filled in, as YAML that `load_settings` reads back."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True)


def check(settings: Settings) -> None:
    """Raise UserError, naming cause and remedy, for values that no run could use."""
    data, optimisation, evaluation = settings.data, settings.optimisation, settings.evaluation
    for name, value in (("model", settings.model), ("output", settings.output), ("data.train", data.train)):
        if not value:
            raise UserError(f"The setting {name} is missing: give it in the configuration file or as {name}=...")
    if data.sequence_length < 2:
        raise UserError(
            f"data.sequence_length must be at least 2, got {data.sequence_length}: a row predicts each token from "
            "those before it."
        )
    numbers = {
        "evaluation.rows_per_batch": evaluation.rows_per_batch,
        "evaluation.every": evaluation.every,
        "evaluation.patience": evaluation.patience,
        "data.eval_tokens": data.eval_tokens,
        "checkpoints.every": settings.checkpoints.every,
        "checkpoints.keep": settings.checkpoints.keep,
    }
    _at_least_one(numbers)
    _positive({"checkpoints.minutes": settings.checkpoints.minutes})
    _positive({"tracking.peak_tflops": settings.tracking.peak_tflops})
    if not evaluation.min_gain >= 0:
        raise UserError(f"evaluation.min_gain must not be negative, got {evaluation.min_gain}.")
    if data.eval_fraction is not None and not 0 < data.eval_fraction < 1:
        raise UserError(f"data.eval_fraction must lie between 0 and 1, got {data.eval_fraction}.")
    check_seed(optimisation.seed, "optimisation.seed")
    check_seed(data.hold_out_seed or 0, "data.hold_out_seed")
    for seed in settings.seeds:
        check_seed(seed, "Each of seeds")
    if data.eval_fraction is not None and data.eval is not None:
        raise UserError(
            "data.eval_fraction splits the training text, so it does not go with data.eval: drop one of them."
        )
    if data.eval_fraction is not None and data.eval_tokens is not None:
        raise UserError("Give data.eval_fraction or data.eval_tokens, not both.")
    if not 0 <= settings.loss.kl < math.inf or not 0 < settings.loss.temperature < math.inf:
        raise UserError("loss.kl must not be negative, loss.temperature greater than 0, and both finite.")
    if (evaluation.patience or evaluation.keep_best) and not (data.eval or data.eval_tokens or data.eval_fraction):
        raise UserError(
            "evaluation.patience and evaluation.keep_best need held-out text: set data.eval, data.eval_tokens or "
            "data.eval_fraction."
        )
    check_optimisation(optimisation, "optimisation")
    from transformer2.training.stages import stages  # which uses the classes of this file

    stages(settings)


def check_optimisation(optimisation: OptimisationSettings, where: str) -> None:
    """The same for `optimisation`, or for a stage; `where` is its name in messages."""
    _at_least_one(
        {
            f"{where}.steps": optimisation.steps,
            f"{where}.rows_per_step": optimisation.rows_per_step,
            f"{where}.rows_per_batch": optimisation.rows_per_batch,
            f"{where}.lora.r": optimisation.lora.r,
        }
    )
    _positive({f"{where}.lr.{kind}": rate for kind, rate in dataclasses.asdict(optimisation.lr).items()})
    _positive({f"{where}.clip": optimisation.clip, f"{where}.lora.alpha": optimisation.lora.alpha})
    shares = {"warmup": optimisation.warmup, "min_lr_ratio": optimisation.min_lr_ratio, "decay": optimisation.decay}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"{where}.{name} must lie between 0 and 1, got {value}.")
    if not 0 <= optimisation.lora.dropout < 1:
        raise UserError(f"{where}.lora.dropout must lie between 0 and below 1, got {optimisation.lora.dropout}.")
    if optimisation.train == "lora" and not optimisation.lora.targets:
        raise UserError(f"{where}.lora.targets is empty: name at least one projection, or set {where}.train=new.")
    if optimisation.schedule == "wsd" and optimisation.warmup + optimisation.decay > 1:
        raise UserError(
            f"{where}.warmup and {where}.decay must not add up to more than 1: they are shares of the steps."
        )
    if not optimisation.weight_decay >= 0:
        raise UserError(f"{where}.weight_decay must not be negative, got {optimisation.weight_decay}.")
    if len(optimisation.betas) != 2 or not all(0 <= beta < 1 for beta in optimisation.betas):
        raise UserError(f"{where}.betas must be two numbers from 0 to below 1, got {optimisation.betas}.")
    patterns = [(f"{where}.frozen", pattern) for pattern in optimisation.frozen]
    for index, group in enumerate(optimisation.groups):
        name = f"{where}.groups[{index}]"
        if not group.match:
            raise UserError(f"{name} has no `match`: give a regular expression for names of parameters.")
        if group.lr is None and group.weight_decay is None:
            raise UserError(f"{name} changes nothing: give it lr or weight_decay.")
        _positive({f"{name}.lr": group.lr})
        if group.weight_decay is not None and not group.weight_decay >= 0:
            raise UserError(f"{name}.weight_decay must not be negative, got {group.weight_decay}.")
        patterns.append((f"{name}.match", group.match))
    for name, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{name}: {pattern!r} is no regular expression ({error}).") from None
    number_of_tokens(optimisation.tokens, f"{where}.tokens")
    for name, value in optimisation.anneal.items():
        if not math.isfinite(value):
            raise UserError(f"{where}.anneal.{name} must be finite, got {value}.")


def number_of_tokens(tokens: int | str | None, name: str) -> int | None:
    """20_000_000 from "20M"; K, M and B (or G) are thousands, millions and billions.

    Raises UserError for anything else, and for less than 1.
    """
    if tokens is None:
        return None
    found = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([KMBG]?)", str(tokens).strip(), re.IGNORECASE)
    count = round(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6}.get(found[2].upper(), 1e9)) if found else 0
    if count < 1:
        raise UserError(f"{name} must be a number of tokens such as 500K, 20M or 1B, got {tokens!r}.")
    return count


def _at_least_one(values: dict[str, int | None]) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")


def _positive(values: dict[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0 and finite, got {value}.")
