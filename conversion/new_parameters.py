"""The new parameters, made without the base model: it exists on the meta device, and only what is new gets storage."""

import torch
from torch import Tensor

from transformer2 import Transformer2Config, Transformer2ForCausalLM
from transformer2.conversion.llama_sources import LlamaSource, llama_shapes

NEW_MODULES = ("residual", "local_mixer", "local_layernorm")  # and what ends in "_residual" or "_local_mixer"


def is_new(name: str) -> bool:
    """Whether a parameter belongs to a residual or a local mixer, rather than to the pretrained Llama.

    name: its full name in the model, such as "model.layers.0.attn_residual.rewrite.carry".
    """
    modules = name.split(".")[:-1]
    return any(module in NEW_MODULES or module.endswith(("_residual", "_local_mixer")) for module in modules)


def meta_model(config: Transformer2Config) -> Transformer2ForCausalLM:
    """The model without storage: names, shapes and classes only."""
    with torch.device("meta"):
        return Transformer2ForCausalLM(config)


def new_tensors(config: Transformer2Config, source: LlamaSource) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and storage type of every tensor that the target has and a Llama has not, by name."""
    return _describe(meta_model(config), source)


def _describe(model: Transformer2ForCausalLM, source: LlamaSource) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    base = llama_shapes(source.config)
    kept = model.model.residual.keep_in_float32
    return {
        name: (tuple(tensor.shape), storage_dtype(name, kept, source.dtype))
        for name, tensor in model.state_dict().items()
        if name not in base
    }


def storage_dtype(name: str, keep_in_float32: tuple[str, ...], base_dtype: torch.dtype) -> torch.dtype:
    """float32 below the modules that a variant keeps in float32, the base's type elsewhere: what the library loads."""
    kept = any(f".{module}." in f".{name}" for module in keep_in_float32)
    return torch.float32 if kept else base_dtype


def initialise(config: Transformer2Config, source: LlamaSource, seed: int) -> dict[str, Tensor]:
    """The new parameters as the model starts them, reproducible by `seed`; the global generator is left alone."""
    model = meta_model(config)
    described = _describe(model, source)
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for prefix, module in model.named_modules():
            owned = [name for name, _ in module.named_parameters(recurse=False)]
            owned += [name for name, _ in module.named_buffers(recurse=False)]
            names = {name: f"{prefix}.{name}" for name in owned if f"{prefix}.{name}" in described}
            if not names:
                continue
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
            for name, full_name in names.items():
                tensors[full_name] = getattr(module, name).detach().to(described[full_name][1])
            module.to_empty(device="meta", recurse=False)
    if lost := sorted(set(described) - set(tensors)):
        raise RuntimeError(f"New tensors without an owner: {lost}")
    return tensors
