"""GGUF files: dequantised once into a bfloat16 safetensors folder, which then is the source like any other."""

from pathlib import Path
from typing import Any

import torch

from transformer2.conversion.checkpoints import file_sha256, read_json
from transformer2.conversion.families import FAMILIES, one_line
from transformer2.conversion.files import readable_as_usual, require_space, write_json
from transformer2.conversion.paths import parents_for, plain_os_errors
from transformer2.conversion.publishing import partial_folder, publish
from transformer2.errors import MachineError, UserError

RECORD = "dequantisation.json"


def dequantise(gguf_file: Path, output: Path) -> tuple[Path, dict[str, Any]]:
    """The folder `OUTPUT-dequantised` next to `output`, made unless it is there already, and facts about it.

    The folder is kept: conversion copies its bytes, and verification compares with it. Raises UserError for another
    architecture, or if the folder holds something else; MachineError without the gguf package.
    """
    try:
        import gguf
    except ImportError:
        raise MachineError("Reading GGUF files takes the gguf package: pip install 'transformer2[gguf]'.") from None
    try:
        reader = gguf.GGUFReader(gguf_file)
        metadata = {
            name: field.contents() for name, field in reader.fields.items() if "tokenizer.ggml.tokens" not in name
        }
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise UserError(f"{gguf_file} is no readable GGUF file ({error}); download it again.") from None
    if (architecture := metadata.get("general.architecture")) not in FAMILIES:
        raise UserError(
            f"{gguf_file.name} says {architecture!r}, and only these can be converted: {', '.join(FAMILIES)}."
        )
    num_elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    del reader

    folder = output.parent / f"{output.name}-dequantised"
    record = {"source": gguf_file.name, "sha256": file_sha256(gguf_file), "dtype": "bfloat16"}
    if folder.exists():
        if not (folder / RECORD).is_file() or read_json(folder / RECORD) != record:
            raise UserError(f"{folder} already exists and is not the dequantised {gguf_file.name}; move it away.")
        return folder, {**record, "folder": folder.name}

    with parents_for(folder), plain_os_errors(folder.parent), partial_folder(folder) as partial:
        require_space(folder.parent, 2 * num_elements)
        _write(gguf_file, metadata, partial.path)
        write_json(partial.path / RECORD, record)
        publish(partial, folder)
    return folder, {**record, "folder": folder.name}


def _write(gguf_file: Path, metadata: dict[str, Any], folder: Path) -> None:
    import transformers

    # Newer versions keep the weights packed unless told otherwise, older ones always unpack.
    config_class = getattr(transformers, "GgufConfig", None)
    unpack = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, **unpack)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except OSError:  # a full disk is reported elsewhere
        raise
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise UserError(f"transformers cannot read {gguf_file.name}: {one_line(error)}") from None
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    ids = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    for name, token_id in ids.items():  # the file knows better than any default
        if token_id is not None:
            setattr(model.config, name, int(token_id))
            setattr(model.generation_config, name, int(token_id))
            setattr(tokenizer, name.removesuffix("_id"), tokenizer.convert_ids_to_tokens(int(token_id)))
    for name in [name for name in vars(model.config) if name in ("quantization_config", "_model_name_or_path")]:
        delattr(model.config, name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = read_json(folder / "tokenizer_config.json")
    traces = ("is_local", "local_files_only")  # how this machine loaded it
    write_json(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if k not in traces})
    for file in folder.glob("*.safetensors"):
        readable_as_usual(file)
