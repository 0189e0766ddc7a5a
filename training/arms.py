"""What a comparison trains: the arms, and for each the checkpoint that it starts from.

model: my-ddl, control: true              my-ddl, and what is left of it without its new parameters
model: path/to/llama, variants: [...]     a conversion for each variant; the control is the Llama itself
model: {preset: tiny, ...}, variants      random weights; what all arms share starts alike in all of them
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from transformer2.configs import names, nearest_size, preset, variant
from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.training.fitting import check_patterns, parameter_names
from transformer2.training.loading import find_checkpoint, load_tokenizer
from transformer2.training.saving import SIDE_FILES
from transformer2.training.scratch import start_from_scratch
from transformer2.training.settings import Settings

AXES = ("residual", "local_mixer")
CONTROL = "control"
PLAIN = ("standard", "none")
NULLS = {  # what stays as a DDL retrofit starts it: erase is 0, and of v what the model reads is 0
    "write_only": [r"\.rewrite\.erase$"],
    "gate_only": [r"\.rewrite\.(erase$|value\.)|\.(compress|expand)\.weight$"],
}


@dataclass
class Arm:
    """One thing to train. `start` (folder, seed) makes the checkpoint to start from, or names one that is there.

    config: makes the configuration of that checkpoint, without making it.
    """

    name: str
    about: str
    start: Callable[[Path, int], Path]
    config: Callable[[], PreTrainedConfig]
    frozen: list[str] = field(default_factory=list)


def is_comparison(settings: Settings) -> bool:
    """Whether these settings ask for more than one run, or for random weights."""
    several = settings.control or settings.nulls or settings.variants or settings.seeds
    return bool(several) or isinstance(settings.model, dict)


def plan_arms(settings: Settings) -> list[Arm]:
    """The arms in the order in which they are trained, the control first.

    Raises UserError for variants or nulls that the model cannot have, and where there is nothing to compare with.
    """
    if unknown := [name for name in settings.nulls if name not in NULLS]:
        raise UserError(f"There is no null {unknown[0]!r}; choose from: {', '.join(NULLS)}.")
    for what, given in (("variants", settings.variants), ("nulls", settings.nulls), ("seeds", settings.seeds)):
        if doubled := [value for value in given if given.count(value) > 1]:
            raise UserError(f"{what} names {doubled[0]!r} twice; name each once.")
    arms = _from_preset(settings) if isinstance(settings.model, dict) else _from_checkpoint(settings)
    if doubled := [arm.name for arm in arms if [other.name for other in arms].count(arm.name) > 1]:
        raise UserError(f"variants has {doubled[0]!r} among them, which `control: true` trains already; drop one.")
    check_patterns(settings, {arm.name: parameter_names(settings, arm.config()) for arm in arms})
    return arms


def _split(name: str) -> tuple[str, str]:
    """RESIDUAL[+LOCAL_MIXER] -> both names; a mixer's name alone means the standard residual."""
    residual, plus, local_mixer = name.partition("+")
    if not plus and residual not in names("residual") and residual in names("local_mixer"):
        return "standard", residual
    return residual, local_mixer if plus else "none"


def _options(name: str, size: str) -> dict[str, dict[str, Any]]:
    residual, local_mixer = _split(name)
    try:
        return {
            "residual": variant("residual", residual, size),
            "local_mixer": variant("local_mixer", local_mixer, size),
        }
    except ValueError as error:
        raise UserError(f"In variants: {error}") from error


def _from_checkpoint(settings: Settings) -> list[Arm]:
    from transformers import AutoConfig

    import transformer2  # noqa: F401  registers the model family
    from transformer2.conversion import convert
    from transformer2.conversion.checkpoints import open_checkpoint
    from transformer2.conversion.llama_sources import check_llama
    from transformer2.conversion.target_config import build_config

    source = find_checkpoint(settings.model)
    config = AutoConfig.from_pretrained(source)
    axes = tuple((getattr(config, a, None) or {"type": p})["type"] for a, p in zip(AXES, PLAIN, strict=True))
    own = axes[0] if axes[1] == "none" else f"{axes[0]}+{axes[1]}"
    if settings.variants and axes != PLAIN:
        raise UserError(f"variants are tried on a plain model, and {settings.model} has {own} already: name its base.")
    if settings.control and axes == PLAIN and not settings.variants:
        raise UserError(
            f"{settings.model} is a plain model, so a control run would repeat it: convert it first, or name variants."
        )
    if settings.nulls and not (axes[0] == "ddl" and config.residual["form"] == "identity"):
        raise UserError(f"nulls are for models with a residual of type ddl in its identity form, not for {own}.")

    def converted(name: str) -> Arm:
        options = _options(name, nearest_size(config))

        def start(folder: Path, seed: int) -> Path:
            convert(source, folder, **options, seed=seed, verify="L1")
            return folder

        def target() -> PreTrainedConfig:
            return build_config(check_llama(open_checkpoint(source)), **options)

        return Arm(name, f"{name}, converted from {source.name}", start, target)

    arms = []
    if settings.control:
        start = (lambda folder, seed: source) if axes == PLAIN else (lambda folder, seed: write_plain(source, folder))
        about = "the same model without new operators"
        arms.append(Arm(CONTROL, about, start, lambda: config if axes == PLAIN else plain_config(config)))
    arms += [converted(name) for name in settings.variants]
    if not settings.variants:
        arms.append(Arm(own, source.name, lambda folder, seed: source, lambda: config))
    for null in settings.nulls:
        name, about = f"{own}, {null}", f"the null {null}"
        arms.append(Arm(name, about, lambda folder, seed: source, lambda: config, NULLS[null]))
    return arms


def _from_preset(settings: Settings) -> list[Arm]:
    from huggingface_hub.errors import StrictDataclassError

    from transformer2.conversion.llama_sources import one_line

    fields = dict(settings.model)
    name, tokenizer = fields.pop("preset", None), fields.pop("tokenizer", None)
    if not name or not tokenizer:
        raise UserError("model: {preset: ..., tokenizer: ...} needs both: the tokenizer is a folder to take it from.")
    if settings.nulls:
        raise UserError("nulls are for retrofits: a model with random weights has nothing to keep.")
    axes, _, size = str(name).rpartition("-")
    if bool(axes) == bool(settings.variants):
        raise UserError(
            "Name a preset RESIDUAL[+LOCAL_MIXER]-SIZE, such as ddl-tiny, or with variants the SIZE alone."
        )

    def random(arm: str, about: str, variants: str) -> Arm:
        residual, mixer = _split(variants)
        full = f"{residual}+{mixer}-{size}"
        try:
            preset(full, **fields)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise UserError(one_line(error)) from error

        def config() -> PreTrainedConfig:
            return preset(full, **{"vocab_size": len(load_tokenizer(user_path(tokenizer))), **fields})

        def start(folder: Path, seed: int) -> Path:
            start_from_scratch(full, folder, tokenizer, seed=seed, overrides=fields, paired=True)
            return folder

        return Arm(arm, about, start, config)

    arms = [random(CONTROL, "standard residual, no local mixer", "standard")] if settings.control else []
    arms += [random(variants, variants, variants) for variants in (settings.variants or [axes])]
    if settings.control and any(_split(arm.name) == PLAIN for arm in arms[1:]):
        raise UserError("The preset 'standard' is what `control: true` trains; drop one of them.")
    return arms


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the same model without residuals and local mixers."""
    from transformer2 import Transformer2Config

    dropped = ("model_type", "architectures", "auto_map", "transformers_version", *AXES)
    return Transformer2Config(**{name: value for name, value in config.to_dict().items() if name not in dropped})


def write_plain(source: Path, folder: Path) -> Path:
    """What is left of a checkpoint of ours without its residuals and local mixers: a plain model, in its types."""
    from transformers import AutoConfig

    from transformer2 import Transformer2ForCausalLM

    config = plain_config(AutoConfig.from_pretrained(source))
    model = Transformer2ForCausalLM.from_pretrained(source, config=config, dtype="auto")
    model.save_pretrained(folder)
    for pattern in SIDE_FILES[1:]:  # but for its provenance: this is no conversion
        for file in source.glob(pattern):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    return folder
