"""A checkpoint on disk -> model and tokenizer, with what can go wrong said in one sentence."""

from pathlib import Path

import torch

from transformer2.conversion.checkpoints import open_checkpoint
from transformer2.conversion.paths import user_path
from transformer2.errors import MachineError, UserError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


LOADED_AS = ("auto", "float32", "bfloat16", "float16")


def loading_dtype(name: str) -> torch.dtype | str:
    """ "auto" (as stored), or the type of that name, for `load_model`. Raises UserError for another one."""
    if name not in LOADED_AS:
        raise UserError(f"Unknown dtype {name!r}; choose one of: {', '.join(LOADED_AS)}.")
    return name if name == "auto" else getattr(torch, name)


def default_device() -> torch.device:
    """A GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_checkpoint(model: str | Path) -> Path:
    """A folder, or the name of a hub model -> its folder on this machine (downloaded where it is not yet there).

    Raises UserError where there is neither, and where the folder is no complete safetensors checkpoint.
    """
    folder = user_path(model)
    if folder.is_file():
        raise UserError(f"{model} is a file: give the folder of the model.")
    if not folder.is_dir():
        folder = _from_hub(str(model))
    open_checkpoint(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype | str = "auto", attention: str | None = None):
    """The causal language model in a checkpoint folder, ours or a plain Llama, with every weight from the checkpoint.

    attention: the backend, None for the library's choice. Raises UserError where the library cannot load it, or would
    invent weights that are missing, and MachineError where it lacks the backend.
    """
    import transformers

    import transformer2  # noqa: F401  registers the model family

    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, attn_implementation=attention
        )
    except ImportError as error:
        raise MachineError(
            f"{attention} is not installed here ({str(error).strip().splitlines()[0]}): use sdpa, or install it."
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"Cannot load the model in {folder}: {str(error).strip().splitlines()[0]}") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"{folder} lacks {len(missing)} of its model's weights, such as {missing[0]}, and they would start at "
            "random: convert the checkpoint again."
        )
    return model


def load_tokenizer(folder: Path):
    """The tokenizer in a checkpoint folder. Raises UserError where there is none."""
    from transformers import AutoTokenizer

    problem = f"{folder} has no usable tokenizer: copy the base model's tokenizer files into it."
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, AttributeError) as error:  # each of them says "no tokenizer here"
        raise UserError(problem) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # of some model types the library makes up an empty one
        raise UserError(problem)
    return tokenizer


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of every tensor of a safetensors checkpoint, by name."""
    return {name: entry.file for name, entry in open_checkpoint(folder).tensors.items()}


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The type of every tensor of a safetensors checkpoint, by name, from the headers alone.

    Raises UserError for a quantised checkpoint: its weights cannot be trained, nor written back as they were.
    """
    tensors = open_checkpoint(folder).tensors
    for name, entry in tensors.items():
        if entry.dtype not in DTYPES:
            raise UserError(f"{folder} is quantised ({name} is {entry.dtype}): train the unquantised checkpoint.")
    return {name: DTYPES[entry.dtype] for name, entry in tensors.items()}


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"There is no folder {name}.")
    patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "NOTICE*"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a full disk, for example
        raise UserError(
            f"There is no folder {name}, and no model of that name could be fetched from the hub."
        ) from error
