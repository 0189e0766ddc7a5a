"""A network that runs without ever being in memory as a whole: layer by layer, for many inputs at once.

The model exists on the meta device, and its own forward pass is what runs, cut at the layers. A first run, in which
the layers are stubs, shows what the first layer gets, and with which masks, positions and caches each layer is called.
Then every layer is loaded once, called for all inputs and dropped. A last run, in which the last stub returns what the
last layer made, shows what follows the layers. So nothing here knows a family or a variant.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from transformer2 import Transformer2Config
from transformer2.caches import repair
from transformer2.compat import CACHE_FIELD
from transformer2.conversion.checkpoints import DTYPES, TensorEntry, tell_bytes
from transformer2.conversion.llama_sources import EMBEDDING, HEAD

Stream = tuple[Tensor, ...]


class _Entered(Exception):
    """All layers were reached: what comes after them is not wanted."""


@dataclass
class Call:
    """One forward call: its inputs, what the next layer gets, and the keyword arguments of every layer."""

    inputs: dict[str, Tensor]
    stream: Stream = ()
    keywords: list[dict[str, Any]] = field(default_factory=list)


class Run:
    """One input of a network, or a prefill and what follows it from the cache."""

    def __init__(self, chunks: list[dict[str, Tensor]], cached: bool):
        self.calls, self.cached = [Call(inputs) for inputs in chunks], cached
        self.cache: Cache | None = None


class LayerStream:
    """A causal language model, on the meta device but for what is loaded at the moment.

    tensors: where its weights are, by name. dtype: the type that it computes in. resident: names of parameters that
    stay in memory, with gradients; so does, without, what is outside layers and neither embedding nor head.
    """

    def __init__(
        self,
        model_class: type,
        config: Any,
        tensors: dict[str, TensorEntry],
        dtype: torch.dtype,
        resident: set[str] = frozenset(),
    ):
        self.tensors, self.dtype = tensors, dtype
        with torch.device("meta"):
            self.model = model_class._from_config(copy.deepcopy(config), dtype=dtype).eval().requires_grad_(False)
        self.resident = {
            name: nn.Parameter(read_tensor(self._entry(name)).to(parameter.dtype))
            for name, parameter in self.model.named_parameters()
            if name in resident
        }
        self.decoder = self.model.model
        self.layers = list(self.decoder.layers)
        self.decoder.rotary_emb = type(self.decoder.rotary_emb)(config=self.config)  # it has no weights
        for name, module in self.decoder.named_children():
            if name not in ("layers", "embed_tokens", "rotary_emb"):
                self._fill(module, f"model.{name}")

    @property
    def config(self) -> Any:
        return self.model.config

    def __len__(self) -> int:
        return len(self.layers)

    def enter(self, runs: list[Run]) -> None:
        """Give every call of `runs` the stream that reaches the first layer."""
        with self._loaded(self.decoder.embed_tokens, "model.embed_tokens"):
            for run in runs:
                cache = self._new_cache() if run.cached else None
                for call in run.calls:
                    with self._stubs(self._recorder(call, cache)), contextlib.suppress(_Entered):
                        self.decoder(**call.inputs, **self._cache_arguments(cache))
                run.cache = self._new_cache() if run.cached else None

    def step(self, index: int, runs: list[Run]) -> None:
        """Take all runs through one layer."""
        layer = self.layers[index]
        with self._loaded(layer, f"model.layers.{index}"):
            for run in runs:
                for call in run.calls:
                    call.stream = self.through(index, call, run.cache)

    def through(self, index: int, call: Call, cache: Cache | None = None) -> Stream:
        """The stream after a loaded layer."""
        keywords = {name: cache if isinstance(v, Cache) else v for name, v in call.keywords[index].items()}
        output = self.layers[index](*call.stream, **keywords)
        return output if isinstance(output, tuple) else (output,)

    def leave(self, run: Run) -> Tensor:
        """[B, T, D], what reaches the head, after all layers; the chunks of a cached run are joined."""
        cache = self._new_cache() if run.cached else None
        hidden = []
        for call in run.calls:
            inputs = {name: value for name, value in call.inputs.items() if name != "input_ids"}
            size = (*call.inputs["input_ids"].shape, self.config.hidden_size)
            inputs["inputs_embeds"] = torch.zeros(size, dtype=self.dtype)  # of no consequence: the stubs know better
            with self._stubs(self._replacer(call, cache)):
                output = self.decoder(**inputs, **self._cache_arguments(cache))
            hidden.append(output.last_hidden_state)
        return torch.cat(hidden, dim=1)

    @contextlib.contextmanager
    def head(self) -> Iterator[nn.Module]:
        """The head, loaded meanwhile."""
        with self._loaded(self.model.lm_head, "lm_head"):
            yield self.model.lm_head

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """A layer, loaded meanwhile."""
        with self._loaded(self.layers[index], f"model.layers.{index}"):
            yield self.layers[index]

    def _cache_arguments(self, cache: Cache | None) -> dict[str, Any]:
        return {"use_cache": False} if cache is None else {"use_cache": True, CACHE_FIELD: cache}

    def _new_cache(self) -> Cache:
        cache = DynamicCache(config=self.config)
        if isinstance(self.config, Transformer2Config):
            repair(cache, self.config)
        return cache

    def _recorder(self, call: Call, cache: Cache | None) -> Callable[..., Any]:
        def stub(index: int, *stream: Tensor, **keywords: Any) -> Any:
            if index == 0:
                call.stream, call.keywords = stream, []
            call.keywords.append(keywords)
            self._fill_cache(index, call, cache)
            if index == len(self) - 1:
                raise _Entered
            return stream if self._has_stream else stream[0]

        return stub

    def _replacer(self, call: Call, cache: Cache | None) -> Callable[..., Any]:
        def stub(index: int, *stream: Tensor, **keywords: Any) -> Any:
            self._fill_cache(index, call, cache)
            stream = call.stream if index == len(self) - 1 else stream
            return stream if self._has_stream else stream[0]

        return stub

    @property
    def _has_stream(self) -> bool:
        """Whether layers return a tuple, as ours do."""
        return isinstance(self.config, Transformer2Config)

    def _fill_cache(self, index: int, call: Call, cache: Cache | None) -> None:
        """As many keys and values as the layer would have written: masks and positions depend on their number."""
        if cache is not None:
            batch, length = call.inputs["input_ids"].shape
            size = (batch, self.config.num_key_value_heads, length, self.layers[index].self_attn.head_dim)
            cache.update(torch.zeros(size, dtype=self.dtype), torch.zeros(size, dtype=self.dtype), index)

    @contextlib.contextmanager
    def _stubs(self, stub: Callable[..., Any]) -> Iterator[None]:
        for index, layer in enumerate(self.layers):
            layer.forward = lambda *stream, index=index, **keywords: stub(index, *stream, **keywords)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    @contextlib.contextmanager
    def _loaded(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """The weights of a module in memory meanwhile."""
        empty = dict(module.named_parameters())
        self._fill(module, prefix)
        try:
            yield
        finally:
            for name, parameter in empty.items():
                _put(module, name, parameter)

    def _fill(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in list(module.named_parameters()):
            full_name = f"{prefix}.{name}"
            loaded = self.resident.get(full_name)
            if loaded is None:
                loaded = nn.Parameter(read_tensor(self._entry(full_name)).to(parameter.dtype), requires_grad=False)
            _put(module, name, loaded)

    def _entry(self, name: str) -> TensorEntry:
        """Tied embeddings may be stored under either name."""
        other = {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name)
        tied = other is not None and self.config.tie_word_embeddings
        return self.tensors[other if tied and name not in self.tensors else name]


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own_name = name.rpartition(".")
    module.get_submodule(owner)._parameters[own_name] = parameter


def read_tensor(entry: TensorEntry) -> Tensor:
    """One stored tensor, read rather than mapped: mapped files count as memory in use."""
    if hasattr(entry, "read"):  # one that is cast
        return entry.read()
    tensor = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
    if tensor.numel():
        buffer = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        with open(entry.file, "rb", buffering=0) as stream:
            stream.seek(entry.start)
            while buffer:
                if not (count := stream.readinto(buffer)):
                    raise OSError(f"{entry.file} ended early; it changed while it was read.")
                buffer = buffer[count:]
                tell_bytes(count)
    return tensor
