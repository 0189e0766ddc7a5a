"""Text from a checkpoint, shown as it is made, with the speed at which it was made."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor
from transformers import CompileConfig, TextStreamer, set_seed

from transformer2.conversion.paths import check_seed, plain_os_errors
from transformer2.errors import MachineError, UserError
from transformer2.training.loading import default_device, find_checkpoint, load_model, load_tokenizer, loading_dtype

LOWEST_TEMPERATURE = 1e-4  # below, logits divided by it leave float32
ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Generated:
    """New text, the tokens of the prompt and of the new text, and the seconds to the first and to the last token."""

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first, which waits for the whole prompt; None where there are none."""
        decoding = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / decoding if self.new_tokens > 1 and decoding > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


class _Stopwatch(TextStreamer):
    """The library's streamer into any file, or none, that notes when the first token came."""

    def __init__(self, tokenizer: Any, file: TextIO | None):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.file, self.first = file, None

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt and self.first is None:
            self.first = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.file is not None:
            print(text, flush=True, end="\n" if stream_end else "", file=self.file)


class Generator:
    """A checkpoint that is ready to write.

    dtype: "auto" (as stored), "float32", "bfloat16" or "float16". device: "auto" (a GPU if there is one), "cpu",
    "cuda", "cuda:1", ... attention: a backend of `ATTENTION`, None for the library's choice. compiled: decode with a
    static cache through `torch.compile`; the first tokens then take long.

    Raises UserError for a missing checkpoint or tokenizer and unknown values, MachineError for what is not installed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        attention: str | None = None,
        compiled: bool = False,
    ):
        kind = loading_dtype(dtype)
        if attention is not None and attention not in ATTENTION:
            raise UserError(f"Unknown attention backend {attention!r}; choose one of: {', '.join(ATTENTION)}.")
        self.device = known_device(device)
        if attention == "flex_attention" and self.device.type == "cpu":
            raise MachineError("flex_attention does not decode on a CPU: use sdpa or eager.")
        folder = find_checkpoint(model)
        self.tokenizer = load_tokenizer(folder)
        self.network = load_model(folder, kind, attention).eval().to(self.device)
        self.compiled = compiled

    def encode(self, prompt: str) -> dict[str, Tensor]:
        """input_ids and attention_mask, [1, T]. Raises UserError for a prompt without tokens, or that is no text."""
        check_text(prompt)
        encoded = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        if encoded["input_ids"].shape[1] == 0:
            raise UserError("The prompt is empty: give some text.")
        return dict(encoded)

    def encode_chat(self, messages: list[dict[str, str]]) -> dict[str, Tensor]:
        """The same for a conversation, in the checkpoint's format, up to where the answer begins.

        Raises UserError where it has none, or where that refuses the messages.
        """
        from jinja2 import TemplateError

        for message in messages:
            check_text(message["content"])
        if not messages[-1]["content"].strip():
            raise UserError("The prompt is empty: give some text.")

        if not self.tokenizer.chat_template:
            raise UserError(
                "This checkpoint has no chat format (chat_template in its tokenizer): use `transformer2 generate` "
                "without --chat, or give it the tokenizer of a chat model."
            )
        try:
            encoded = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except TemplateError as error:
            raise UserError(f"The checkpoint's chat format refuses this conversation: {error}.") from error
        return dict(encoded)

    def write(
        self,
        inputs: dict[str, Tensor],
        *,
        file: TextIO | None = None,
        max_new_tokens: int = 200,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> Generated:
        """The continuation of `inputs`, written to `file` token by token.

        do_sample, temperature, top_p, top_k: None for what the checkpoint says; any of the last three means sampling.
        Raises UserError for values out of range and prompts longer than the context.
        """
        check_options(max_new_tokens, temperature, top_p, top_k, seed)
        length, context = inputs["input_ids"].shape[1], self.network.config.max_position_embeddings
        if length >= context:
            raise UserError(
                f"The prompt has {length:,} tokens, and the model's context is {context:,}: shorten it, and "
                "in a chat start anew, whose earlier messages count."
            )
        wanted: dict[str, Any] = {"do_sample": do_sample, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        if do_sample is None and (temperature is not None or top_p is not None or top_k is not None):
            wanted["do_sample"] = True
        if do_sample is False and len([value for value in wanted.values() if value is not None]) > 1:
            raise UserError("Without sampling, temperature, top-p and top-k mean nothing: leave them out.")
        wanted = {name: value for name, value in wanted.items() if value is not None}
        if self.network.generation_config.pad_token_id is None:
            pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
            wanted["pad_token_id"] = end if pad is None else pad
        if self.compiled:
            config = CompileConfig(fullgraph=True, mode="default")
            config._compile_all_devices = True  # the library compiles on GPUs only
            wanted.update(cache_implementation="static", compile_config=config)
        if seed is not None:
            set_seed(seed)
        stopwatch = _Stopwatch(self.tokenizer, file)
        inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
        new = min(max_new_tokens, context - length)
        start = time.perf_counter()
        with torch.no_grad():
            output = self.network.generate(**inputs, max_new_tokens=new, streamer=stopwatch, **wanted)[0, length:]
        end = time.perf_counter()
        text = self.tokenizer.decode(output, skip_special_tokens=True)
        return Generated(text, length, len(output), (stopwatch.first or end) - start, end - start)


@dataclass
class Conversation:
    """The messages so far; `say` adds a question and its answer."""

    generator: Generator
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, **options: Any) -> Generated:
        """The answer to `text`, given what was said before. options: of `Generator.write`.

        Raises UserError as that does; the conversation then stays as it was.
        """
        before = [{"role": "system", "content": self.system}] if self.system else []
        question = {"role": "user", "content": text}
        answer = self.generator.write(self.generator.encode_chat([*before, *self.messages, question]), **options)
        self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer


def check_options(
    max_new_tokens: int, temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> None:
    """Raise UserError for what `Generator.write` cannot do."""
    whole = {"number of new tokens": max_new_tokens, "top-k": top_k, "seed": seed}
    for name, value in whole.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UserError(f"The {name} must be a whole number, got {value!r}.")
    for name, value in (("temperature", temperature), ("top-p", top_p)):
        if value is not None and not isinstance(value, int | float):
            raise UserError(f"The {name} must be a number, got {value!r}.")
    if max_new_tokens < 1:
        raise UserError(f"The number of new tokens must be at least 1, got {max_new_tokens}.")
    if temperature is not None and not temperature >= LOWEST_TEMPERATURE:
        raise UserError(
            f"The temperature must be at least {LOWEST_TEMPERATURE}, got {temperature}; without sampling, the "
            "likeliest token is always taken."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"Top-p must be above 0 and at most 1, got {top_p}.")
    if top_k is not None and top_k < 1:
        raise UserError(f"Top-k must be at least 1, got {top_k}.")
    check_seed(seed or 0)


def check_text(text: str) -> None:
    """Raise UserError for bytes that are no text: Python passes them through arguments and streams in disguise."""
    if not isinstance(text, str):
        raise UserError(f"The prompt must be a text, got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The prompt is not valid UTF-8, at character {error.start + 1}: convert it first.") from None


def known_device(name: str) -> torch.device:
    """The device of that name, "auto" being a GPU if there is one. Raises UserError if it is none or is not there."""
    if name == "auto":
        return default_device()
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise UserError(f"There is no device {name!r} here; use auto, cpu, or cuda where there is a GPU.") from None
    if device.type == "meta":
        raise UserError("The device meta holds no numbers; use auto, cpu, or cuda where there is a GPU.")
    return device


@plain_os_errors()
def generate(
    model: str | Path,
    prompt: str,
    *,
    file: TextIO | None = None,
    chat: bool = False,
    system: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    compiled: bool = False,
    **options: Any,
) -> str:
    """Continue `prompt` (with `chat`: answer it, in the checkpoint's chat format) and return the new text.

    file: where to write the text token by token. system: a system prompt, for chat. dtype, device, attention,
    compiled: of `Generator`. options: of `Generator.write`. Raises UserError as those do.
    """
    generator = Generator(model, dtype=dtype, device=device, attention=attention, compiled=compiled)
    if chat:
        return Conversation(generator, system).say(prompt, file=file, **options).text
    return generator.write(generator.encode(prompt), file=file, **options).text
