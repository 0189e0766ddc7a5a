"""The settings of a training run: what a YAML file may say, what each key means, and a strict reader for it.

The dataclasses below are the schema. A key that is not a field is an error with a suggestion, so that a misspelt
setting can never be ignored in silence.
"""

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.variants import describe


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

    new: of residuals and local mixers. The default suits the matrices of ShortSWA, which diverged at 2e-3; DDL has few
        parameters and wants 1e-3 to 3e-3 (it diverged at 2e-2).
    pretrained: of everything else, where `train` is "all".
    """

    new: float = 3e-4
    pretrained: float = 2e-5


@dataclass
class OptimisationSettings:
    """What is trained, and how.

    train: "new", the residuals and local mixers only, or "all".
    frozen: regular expressions; parameters whose name one of them is found in are not trained, whatever `train` says.
    steps: optimiser steps.
    rows_per_step: rows of `sequence_length` tokens in one optimiser step, over all processes.
    rows_per_batch: rows in one forward pass of one process; the rest of a step is accumulated.
    lr: peak learning rates, see `LearningRates`.
    schedule: after the warm-up, "cosine" decay to `min_lr_ratio` times the peak, or "constant".
    warmup: share of the steps over which the learning rate rises linearly.
    min_lr_ratio: learning rate at the end of a cosine, as a share of the peak.
    weight_decay: of the weights of linear layers and embeddings, except gates; everything else has none.
    betas: of AdamW.
    clip: largest norm of the gradient; null: no clipping.
    precision: "bf16" (autocast, trained parameters in float32), "fp32", or "auto", see `training.precision`.
    gradient_checkpointing: recompute each layer in the backward pass: less memory, about a third more time.
    seed: of the order of the rows, of the split and of dropout.
    """

    train: Literal["new", "all"] = "new"
    frozen: list[str] = field(default_factory=list)
    steps: int = 100
    rows_per_step: int = 8
    rows_per_batch: int = 1
    lr: LearningRates = field(default_factory=LearningRates)
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.05
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float | None = 1.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    seed: int = 0


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
    """When the held-out text is evaluated, besides before the first and after the last step.

    every: also after every so many steps; null: not.
    rows_per_batch: rows in one forward pass.
    """

    every: int | None = None
    rows_per_batch: int = 1


@dataclass
class Settings:
    """One training run.

    model: the checkpoint to start from: a folder, or a hub name. Or random weights: {preset: ddl-135m, tokenizer:
        path/to/a/model}, with fields of the configuration to change, such as num_hidden_layers, besides.
    output: the folder to write; it appears only when the run has succeeded.
    overwrite: replace an output folder that is there already.
    control: train the plain model, too, on the same data, order and steps, and report whether the variant helped.
    nulls: with a DDL retrofit, also train it without a part: "write_only" (nothing is ever erased) or "gate_only"
        (nothing is erased, and sublayers write their output alone).
    variants: instead of the model's own, train each of these RESIDUAL[+LOCAL_MIXER] presets on it.
    seeds: train everything once for each of these seeds; empty: for `optimisation.seed` alone.
    data, optimisation, loss, evaluation: see the classes of these names.
    """

    model: str | dict[str, Any] = ""
    output: str = ""
    overwrite: bool = False
    control: bool = False
    nulls: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    data: DataSettings = field(default_factory=DataSettings)
    optimisation: OptimisationSettings = field(default_factory=OptimisationSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


def load_settings(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Settings:
    """A YAML file (or a mapping of the same shape) and overrides like "optimisation.lr.new=1e-3" -> checked settings.

    Raises UserError for a file that is not there or not YAML, an unknown key, a value of the wrong type, or values
    that make no sense together.
    """
    tree = dict(source) if isinstance(source, Mapping) else _read_yaml(Path(source))
    for override in overrides:
        tree = _override(tree, override)
    settings = _build(Settings, tree, "")
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
    at_least_one = {
        "optimisation.steps": optimisation.steps,
        "optimisation.rows_per_step": optimisation.rows_per_step,
        "optimisation.rows_per_batch": optimisation.rows_per_batch,
        "evaluation.rows_per_batch": evaluation.rows_per_batch,
        "evaluation.every": evaluation.every,
        "data.eval_tokens": data.eval_tokens,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    positive = {"optimisation.lr.new": optimisation.lr.new, "optimisation.lr.pretrained": optimisation.lr.pretrained}
    positive["optimisation.clip"] = optimisation.clip
    for name, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} must be greater than 0 and finite, got {value}.")
    shares = {"optimisation.warmup": optimisation.warmup, "optimisation.min_lr_ratio": optimisation.min_lr_ratio}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UserError(f"{name} must lie between 0 and 1, got {value}.")
    if not optimisation.weight_decay >= 0:
        raise UserError(f"optimisation.weight_decay must not be negative, got {optimisation.weight_decay}.")
    if len(optimisation.betas) != 2 or not all(0 <= beta < 1 for beta in optimisation.betas):
        raise UserError(f"optimisation.betas must be two numbers from 0 to below 1, got {optimisation.betas}.")
    if data.eval_fraction is not None and not 0 < data.eval_fraction < 1:
        raise UserError(f"data.eval_fraction must lie between 0 and 1, got {data.eval_fraction}.")
    if not 0 <= settings.optimisation.seed < 2**32:
        raise UserError(f"optimisation.seed must lie between 0 and 2^32 - 1, got {settings.optimisation.seed}.")
    if data.eval_fraction is not None and data.eval is not None:
        raise UserError(
            "data.eval_fraction splits the training text, so it does not go with data.eval: drop one of them."
        )
    if not 0 <= settings.loss.kl < math.inf or not 0 < settings.loss.temperature < math.inf:
        raise UserError("loss.kl must not be negative, loss.temperature greater than 0, and both finite.")
    for pattern in optimisation.frozen:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"optimisation.frozen: {pattern!r} is no regular expression ({error}).") from None
    if data.eval_fraction is not None and data.eval_tokens is not None:
        raise UserError("Give data.eval_fraction or data.eval_tokens, not both.")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(user_path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The configuration file {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(
            f"The configuration file {path} must hold keys and values, such as `model: path/to/checkpoint`."
        )
    return tree


def _override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `tree` with "a.b=value" put in; the value is read as YAML."""
    path, equals, text = override.partition("=")
    if not equals or not all(path.split(".")):
        raise UserError(f"Cannot read the override {override!r}: write it as section.key=value.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"The value of the override {override!r} is not YAML: quote it.") from None
    key, _, rest = path.partition(".")
    if rest:
        section = tree.get(key)
        value = _override(dict(section) if isinstance(section, Mapping) else {}, f"{rest}={text}")
    return {**tree, key: value}


def _build(schema: type, tree: Any, where: str) -> Any:
    """A mapping -> the dataclass `schema`; `where` is the dotted path of the section, for messages."""
    if not isinstance(tree, Mapping):
        raise UserError(f"The setting {where} must be a section of keys and values, got {tree!r}.")
    known = typing.get_type_hints(schema)
    values = {}
    for key, value in tree.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the keys here are: {', '.join(known)}."
            raise UserError(f"Unknown setting {name!r}: {hint}")
        if dataclasses.is_dataclass(known[key]):
            values[key] = _build(known[key], value, name)
        else:
            values[key] = _convert(value, known[key], name)
    return schema(**values)


def _convert(value: Any, annotation: Any, name: str) -> Any:
    """`value` in its annotated type. YAML reads 1e-3 as text, so text is accepted for numbers."""
    for kind in _alternatives(annotation):
        origin = typing.get_origin(kind)
        if origin is Literal and value in typing.get_args(kind):
            return value
        if origin is list and isinstance(value, list | tuple):
            return [_convert(item, typing.get_args(kind)[0], name) for item in value]
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if kind is type(None) and value is None:
            return None
        if kind is float and not isinstance(value, bool) and isinstance(value, int | float | str):
            try:
                return float(value)
            except ValueError:
                continue
        if kind in (bool, int, str) and type(value) is kind:
            return value
    raise UserError(f"The setting {name} must be {describe(annotation)}, got {value!r}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    several = typing.get_origin(annotation) in (types.UnionType, typing.Union)  # the latter: Literal[...] | None
    return typing.get_args(annotation) if several else (annotation,)
