"""Low-rank adapters on the pretrained projections, together with full training of the new modules, through PEFT.

PEFT saves only what its configuration names: parameters that were merely unfrozen would be missing from the adapter
without a word, and "all-linear" would adapt our gates. So the configuration is built here, from the model, and what is
adapted, trained and saved is compared with what should be.
"""

import re
from pathlib import Path

from torch import nn

from transformer2.conversion.new_parameters import NEW_MODULES, is_new
from transformer2.errors import CheckFailed, UserError
from transformer2.training.parameters import canonical, named_parameters
from transformer2.training.schema import LoraSettings

FOLDER = "adapter"  # in the output of a run
BASE_FILE = "transformer2_base.json"  # which weights it was trained on


def new_modules(model: nn.Module) -> list[str]:
    """The outermost modules that are new and own parameters, such as "model.layers.0.attn_residual"."""
    found = {}
    for name in (name for name, _ in model.named_parameters() if is_new(name)):
        path = name.split(".")
        last = next(i for i, part in enumerate(path) if part in NEW_MODULES or part.endswith(_ENDS))
        found[".".join(path[: last + 1])] = None
    return list(found)


def lora_config(model: nn.Module, settings: LoraSettings):
    """The configuration of PEFT: adapters on the `targets` of attention and MLP, every new module trained as a whole.

    Raises UserError where the model has none of the targets.
    """
    from peft import LoraConfig

    target = rf"(.*\.)?layers\.\d+\.(self_attn|mlp)\.({'|'.join(settings.targets)})"
    if not any(re.fullmatch(target, name) for name, _ in model.named_modules()):
        raise UserError(f"This model has no projection called {' or '.join(settings.targets)}: change lora.targets.")
    full = new_modules(model)
    short = sorted({name.rpartition(".")[2] for name in full})
    names = {name for name, _ in model.named_modules()}
    matched = {name for name in names if any(name.endswith(ending) for ending in short)}  # as PEFT does
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=target,
        modules_to_save=(short if matched == set(full) else full) or None,
        task_type="CAUSAL_LM",
    )


def add_adapters(model: nn.Module, settings: LoraSettings):
    """Put adapters into `model`, which changes, and return PEFT's view of it.

    Raises CheckFailed where PEFT has adapted, or would train, anything but what it should.
    """
    from peft import get_peft_model

    wanted = {name for name, _ in model.named_parameters() if is_new(name)}
    config = lora_config(model, settings)
    target = re.compile(config.target_modules)
    adapted = {name for name, _ in model.named_modules() if target.fullmatch(name)}
    wanted |= {f"{name}.lora_{part}.default.weight" for name in adapted for part in "AB"}
    peft_model = get_peft_model(model, config)
    _compare("train", {name for name, parameter in named_parameters(model) if parameter.requires_grad}, wanted)
    return peft_model


def save_adapter(peft_model, folder: Path, base: str) -> None:
    """Write adapters and new modules; `base` is the name of the model that they belong to.

    Raises CheckFailed unless the file holds exactly the trained parameters.
    """
    from safetensors import safe_open

    peft_model.peft_config["default"].base_model_name_or_path = base
    peft_model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody has filled in
    model = peft_model.base_model.model
    wanted = {
        name.replace(".default.", ".") for name, _ in named_parameters(model) if ".lora_" in name or is_new(name)
    }
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        saved = {canonical(name.removeprefix("base_model.model.")) for name in tensors.keys()}  # noqa: SIM118
    _compare("save", saved, wanted)


def _compare(what: str, found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise CheckFailed(f"PEFT would not {what} {len(missing)} of the trained parameters, such as {missing[0]}.")
    if more := sorted(found - wanted):
        raise CheckFailed(f"PEFT would {what} {len(more)} parameters that are not meant, such as {more[0]}.")


_ENDS = ("_residual", "_local_mixer")
