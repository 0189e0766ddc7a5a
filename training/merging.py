"""From adapters and the model that they belong to, to one checkpoint that computes the same: `transformer2 merge`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer2.conversion.checkpoints import read_json
from transformer2.conversion.files import write_json
from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.conversion.publishing import partial_folder, publish
from transformer2.conversion.trained import REPORT
from transformer2.errors import CheckFailed, UserError
from transformer2.training.loading import find_checkpoint, load_model, stored_dtypes
from transformer2.training.lora import BASE_FILE, FOLDER
from transformer2.training.parameters import kind_of
from transformer2.training.resuming import model_digest
from transformer2.training.saving import check_output, write_checkpoint

ROUNDING = 1e-4  # of the largest logit, in float32: W x + B A x against (W + B A) x
PROBE = (2, 48)  # random tokens


@plain_os_errors()
def merge(
    adapter: str | Path, output: str | Path, *, base: str | Path | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Write the model with its adapters merged into its weights to the folder `output`, in the base's own types.

    adapter: a folder that PEFT wrote, or the output of a run with adapters. base: the model that they were trained on;
    None: as the adapter says. The merged model's logits are compared with those of base and adapters, in float32.
    -> output, base, adapted (matrices), replaced (parameters trained as a whole), largest_difference, largest_logit.
    Raises UserError for an adapter that is incomplete, or that belongs to another model, and CheckFailed where the
    logits differ by more than rounding; nothing is written then.
    """
    folder, config = _adapter(adapter)
    name = str(base if base is not None else config.get("base_model_name_or_path") or "")
    try:
        source = find_checkpoint(name)
    except UserError as error:
        if base is not None:
            raise
        raise UserError(
            f"{adapter} was trained on {name!r}, which is not here: name its folder with --base."
        ) from error
    _check_belongs(folder, source)
    output = user_path(output)
    check_output(output, source, overwrite)
    dtypes = stored_dtypes(source)
    peft_model, saved = _load(folder, source)
    ids = torch.randint(0, peft_model.config.vocab_size, PROBE, generator=torch.Generator().manual_seed(0))
    live = _logits(peft_model, ids)
    merged = peft_model.merge_and_unload()
    difference, largest = (_logits(merged, ids) - live).abs().max().item(), live.abs().max().item()
    if not difference <= ROUNDING * largest:
        raise CheckFailed(
            f"The merged model's logits differ from those of base and adapters by {difference:.3g} (of {largest:.3g} "
            "at most), which rounding does not explain: nothing was written."
        )
    report = {
        "output": output.name,
        "base": source.name,
        "adapted": sum(".lora_A." in key for key in saved),
        "replaced": sum(kind_of(key) != "lora" for key in saved),
        "largest_difference": difference,
        "largest_logit": largest,
    }
    with plain_os_errors(output.parent), partial_folder(output, overwrite=overwrite) as partial:
        write_checkpoint(merged, partial.path, source, dtypes)
        write_json(partial.path / REPORT, {"pretrained_changed": True, "merged": report})
        publish(partial, output)
    return report


def _adapter(adapter: str | Path) -> tuple[Path, dict[str, Any]]:
    folder = user_path(adapter)
    if not (folder / "adapter_config.json").is_file() and (folder / FOLDER / "adapter_config.json").is_file():
        folder = folder / FOLDER  # the output of a run
    if not (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{adapter} holds no adapter: name a folder with adapter_config.json and adapter_model.safetensors."
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise UserError(f"{folder} has no adapter_model.safetensors; pickled adapters are not read.")
    return folder, read_json(folder / "adapter_config.json")


def _check_belongs(folder: Path, source: Path) -> None:
    """Adapters of our own know the weights that they were trained on."""
    if not (folder / BASE_FILE).is_file():
        return
    if read_json(folder / BASE_FILE).get("model_digest") != model_digest(source):
        raise UserError(f"The adapter in {folder} was trained on other weights than those in {source}: name its base.")


def _load(folder: Path, source: Path) -> tuple[Any, set[str]]:
    """PEFT's view of the model with its adapters, and the names of the tensors in the adapter's file."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(folder / "adapter_model.safetensors")
    except SafetensorError as error:
        raise UserError(f"{folder / 'adapter_model.safetensors'} is damaged ({error}): copy it again.") from error
    saved, model = set(tensors), load_model(source, torch.float32)
    try:
        config = PeftConfig.from_pretrained(folder)
        config.base_model_name_or_path = model.name_or_path
        peft_model = get_peft_model(model, config)
        wanted = set(get_peft_model_state_dict(peft_model, save_embedding_layers=False))
        if missing := sorted(wanted - saved):
            raise UserError(
                f"The adapter in {folder} lacks {len(missing)} tensors, such as {missing[0]}: save it again."
            )
        if more := sorted(saved - wanted):
            raise UserError(f"{source} has no place for {len(more)} tensors of the adapter, such as {more[0]}.")
        set_peft_model_state_dict(peft_model, tensors)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"The adapter in {folder} does not fit {source}: {reason}") from error
    return peft_model.eval(), saved


def _logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
