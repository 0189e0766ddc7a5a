"""Text from a checkpoint, shown as it is made."""

from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import TextStreamer, set_seed

from transformer2.conversion.paths import plain_os_errors
from transformer2.errors import UserError
from transformer2.training.loading import find_checkpoint, load_model, load_tokenizer


class _FileStreamer(TextStreamer):
    """The library's streamer, into any file rather than the standard output."""

    def __init__(self, tokenizer, file: TextIO):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.file = file

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        print(text, flush=True, end="\n" if stream_end else "", file=self.file)


@plain_os_errors()
def generate(
    model: str | Path,
    prompt: str,
    *,
    file: TextIO | None = None,
    max_new_tokens: int = 200,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    chat: bool = False,
    dtype: str = "auto",
) -> str:
    """Continue `prompt` (with `chat`: answer it, in the checkpoint's chat format) and return the new text.

    file: where to write the text token by token. do_sample, temperature, top_p: None for what the checkpoint says; a
    temperature or top_p asks for sampling. dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
    Raises UserError for a missing checkpoint, tokenizer or chat format, and for an empty prompt.
    """
    if max_new_tokens < 1:
        raise UserError(f"The number of new tokens must be at least 1, got {max_new_tokens}.")
    if (temperature is not None and not temperature > 0) or (top_p is not None and not 0 < top_p <= 1):
        raise UserError("The temperature must be greater than 0, and top-p must lie between 0 and 1.")
    if dtype != "auto" and dtype not in ("float32", "bfloat16", "float16"):
        raise UserError(f"Unknown dtype {dtype!r}; choose one of: auto, float32, bfloat16, float16.")
    folder = find_checkpoint(model)
    tokenizer = load_tokenizer(folder)
    inputs = _encode(tokenizer, prompt, chat)
    network = load_model(folder, dtype if dtype == "auto" else getattr(torch, dtype)).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network.to(device)

    wanted: dict[str, Any] = {"do_sample": do_sample, "temperature": temperature, "top_p": top_p}
    if do_sample is None and (temperature is not None or top_p is not None):
        wanted["do_sample"] = True
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if network.generation_config.pad_token_id is None:
        wanted["pad_token_id"] = (
            tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        )
    if seed is not None:
        set_seed(seed)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    streamer = _FileStreamer(tokenizer, file) if file is not None else None
    with torch.no_grad():
        output = network.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **wanted)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _encode(tokenizer, prompt: str, chat: bool) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask, [1, T]"""
    if chat:
        if not tokenizer.chat_template:
            raise UserError("This checkpoint has no chat format (chat_template): leave chat (--chat) out.")
        messages = [{"role": "user", "content": prompt}]
        return dict(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        )
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    if encoded["input_ids"].shape[1] == 0:
        raise UserError("The prompt is empty.")
    return dict(encoded)
