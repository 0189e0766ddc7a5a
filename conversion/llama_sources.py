"""Is this checkpoint a plain, complete Llama? Decided by its config and its tensors' shapes, never by its name."""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from transformer2.conversion.checkpoints import DTYPES, Checkpoint
from transformer2.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLANNED = ("mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "smollm3")


@dataclass(frozen=True)
class LlamaSource:
    """A checked Llama: `config` is the library's own reading of config.json, with the truth about tied embeddings."""

    checkpoint: Checkpoint
    config: Any  # LlamaConfig
    dtype: torch.dtype
    notes: tuple[str, ...]


def check_llama(checkpoint: Checkpoint, assume_tied: bool = False) -> LlamaSource:
    """Raise UserError, naming cause and remedy, unless `checkpoint` is a complete LlamaForCausalLM in a float type."""
    _check_family(checkpoint.config)
    config = _llama_config(checkpoint.config)
    notes: list[str] = []
    config.tie_word_embeddings = _truly_tied(checkpoint, config.tie_word_embeddings, assume_tied, notes)
    _check_tensors(checkpoint, config, notes)
    return LlamaSource(checkpoint, config, _storage_dtype(checkpoint), tuple(notes))


def _check_family(config: dict[str, Any]) -> None:
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    if model_type == "transformer2":
        raise UserError("The source already is a Transformer2 checkpoint; give the Llama that it was made from.")
    if model_type != "llama":
        planned = " (planned)" if model_type in PLANNED else ""
        raise UserError(f"Only Llama models can be converted so far, and config.json says {model_type!r}{planned}.")
    if architectures and "LlamaForCausalLM" not in architectures:
        raise UserError(f"Only LlamaForCausalLM can be converted so far, and config.json says {architectures[0]}.")
    if config.get("quantization_config") or config.get("compression_config"):
        raise UserError("The source is quantised; convert the original half-precision checkpoint instead.")
    if any(name.startswith("AutoModel") for name in config.get("auto_map") or {}):
        raise UserError(
            "The source brings model code of its own (auto_map in config.json), which a conversion would lose; remove "
            "auto_map if the stock Llama code runs it correctly."
        )


def _llama_config(config: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    try:
        return LlamaConfig.from_dict(copy.deepcopy(config))  # standardises rope_scaling and rope_theta
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"transformers refuses the source's config.json: {one_line(error)}") from None


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
        raise UserError(f"The source holds tensors that a Llama of its config does not have: {some(unexpected)}.")
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
    """Names and shapes of a LlamaForCausalLM's tensors, from a model without storage."""
    from transformers import LlamaForCausalLM

    try:
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"transformers cannot build the source from its config.json: {one_line(error)}") from None
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


def one_line(error: Exception) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(error).split())
