"""Is this checkpoint a complete Llama or relative of one? Its config and shapes decide, never its name."""

from dataclasses import dataclass
from typing import Any

import torch

from transformer2.conversion.checkpoints import DTYPES, Checkpoint
from transformer2.conversion.families import class_named, family_of, one_line, read_config
from transformer2.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LlamaSource:
    """A checked source: `config` is its own class's reading of config.json, with the truth about tied embeddings.

    cast: whether the tensors are to be taken in another type than they are stored in (see rewriting.py).
    """

    checkpoint: Checkpoint
    config: Any  # LlamaConfig, MistralConfig, ...
    dtype: torch.dtype
    notes: tuple[str, ...]
    cast: bool = False


def check_llama(checkpoint: Checkpoint, assume_tied: bool = False) -> LlamaSource:
    """Raise UserError, with cause and remedy, unless `checkpoint` is a complete model of a known family, in floats."""
    _check_family(checkpoint.config)
    config = read_config(checkpoint.config)
    notes: list[str] = []
    config.tie_word_embeddings = _truly_tied(checkpoint, config.tie_word_embeddings, assume_tied, notes)
    _check_tensors(checkpoint, config, notes)
    return LlamaSource(checkpoint, config, _storage_dtype(checkpoint), tuple(notes))


def _check_family(config: dict[str, Any]) -> None:
    family_of(config)
    if config.get("quantization_config") or config.get("compression_config"):
        raise UserError("The source is quantised; convert the original half-precision checkpoint instead.")
    if config["model_type"] != "transformer2" and any(
        name.startswith("AutoModel") for name in config.get("auto_map") or {}
    ):
        raise UserError(
            "The source brings model code of its own (auto_map in config.json), which a conversion would lose; remove "
            "auto_map if the stock code of its model_type runs it correctly."
        )


def _truly_tied(checkpoint: Checkpoint, tied: bool, assume_tied: bool, notes: list[str]) -> bool:
    """What `tie_word_embeddings` has to say for the library to load what the checkpoint holds."""
    embedding, head = checkpoint.tensors.get(EMBEDDING), checkpoint.tensors.get(HEAD)
    if embedding is None or head is None:
        if head is None and embedding is not None and not tied:
            if not assume_tied:
                raise UserError(
                    "config.json says tie_word_embeddings: false, but there is no lm_head.weight: the head would be "
                    "random; use assume_tied=True (--assume-tied on the command line) if the model shares its "
                    "embeddings, or download the missing tensor."
                )
            notes.append("config.json said tie_word_embeddings: false without a head; taken as tied (--assume-tied).")
        return True if head is None else tied
    if not tied:
        return False
    if (embedding.dtype, embedding.shape) == (head.dtype, head.shape) and embedding.sha256() == head.sha256():
        notes.append("lm_head.weight repeats the tied embeddings; its bytes are kept.")
        return True
    notes.append(
        "config.json said tie_word_embeddings: true, but the head differs from the embeddings; written as false."
    )
    return False


def _check_tensors(checkpoint: Checkpoint, config: Any, notes: list[str]) -> None:
    expected = llama_shapes(config)
    stored = checkpoint.tensors
    if config.tie_word_embeddings:
        if HEAD not in stored:
            del expected[HEAD]
        elif EMBEDDING not in stored:
            del expected[EMBEDDING]  # the library ties from the head
    computed = {name for name in stored if name.endswith(".rotary_emb.inv_freq")}  # in old checkpoints; never loaded
    if computed:
        notes.append(f"{len(computed)} stored rotary frequencies are kept but never read.")
    if unexpected := sorted(set(stored) - set(expected) - computed):
        raise UserError(
            f"The source holds tensors that a {config.model_type} of its config does not have: {some(unexpected)}."
        )
    if missing := sorted(set(expected) - set(stored)):
        raise UserError(f"The source lacks tensors that its config implies: {some(missing)}; download it again.")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise UserError(f"{name} has shape {list(stored[name].shape)}, but config.json implies {list(shape)}.")
    for name in expected:
        if stored[name].dtype not in DTYPES:
            raise UserError(
                f"{name} is stored as {stored[name].dtype}: the source is quantised or of an unusual type; convert a "
                "float32, float16 or bfloat16 checkpoint."
            )


def llama_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a source's tensors, from a model of its class without storage."""
    try:
        with torch.device("meta"):
            model = class_named(family_of(config.to_dict(), architectures=False).model)(config)
    except Exception as error:  # whatever a model makes of numbers that do not fit, assertions included
        raise UserError(
            f"transformers cannot build the source from its config.json ({type(error).__name__}: "
            f"{one_line(error)}): look for a name or number there that this transformers does not know."
        ) from None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _storage_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The type of most stored weights."""
    counts: dict[str, int] = {}
    for entry in checkpoint.tensors.values():
        counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.num_elements
    return getattr(torch, DTYPES[max(counts, key=counts.__getitem__)])


def some(names: list[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
