"""Rows of a table -> tokens and which of them are targets: prompts with completions, chats, and tokens as they are.

Of a prompt nothing is a target, of a completion everything and the end-of-text token after it; of a chat what the
assistant said, up to the end of its turn. Which tokens those are comes from positions, never from token ids: a
padding token that is also the end of text stays a target where it ends an answer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from transformer2.errors import UserError
from transformer2.training.data import bytes_per_token
from transformer2.training.loss import IGNORED
from transformer2.training.packing import PackedText

KINDS = {  # the columns by which a table is known
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
    "tokens": ("input_ids",),
}
NO_TEMPLATE = (
    "The data holds chats, and the tokenizer has no chat template: give one as data.chat_template (a file, or the "
    "folder of a model that has one)."
)
Encoded = tuple[list[int], list[bool], list[int]]  # ids, whether each is a target, bytes of text of each


def detect_kind(columns: list[str], text_column: str, source: str) -> str:
    """What a table holds: "text" or one of KINDS. Raises UserError for columns that say nothing, or two things."""
    found = [kind for kind, needed in KINDS.items() if set(needed) <= set(columns)]
    found += ["text"] if text_column in columns else []
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{source} could be read as {' or as '.join(found)} by its columns {', '.join(columns)}: say which as "
            "data.kind."
        )
    raise UserError(
        f"{source} has no column {text_column!r}; its columns are: {', '.join(columns)}. Name the one with the text "
        "as data.text_column (or --text-column), or bring messages, prompt and completion, or input_ids."
    )


def encode_examples(examples: Iterable[Mapping[str, Any]], kind: str, tokenizer, source: str) -> PackedText:
    """Examples of one of KINDS -> their tokens. Raises UserError, naming the example, for one that cannot be read."""
    if kind == "chat" and not tokenizer.is_fast:
        raise UserError(
            "Which tokens the assistant said only a fast tokenizer can tell; this checkpoint has a slow one."
        )
    encode = {"prompt_completion": _encode_prompt, "chat": _encode_chat, "tokens": _encode_tokens}[kind]
    tokens, is_target, num_bytes, lengths = [], [], [], []
    for number, example in enumerate(examples, 1):
        try:
            ids, targets, bytes_of = encode(example, tokenizer)
        except _BadExample as error:
            raise UserError(f"Example {number} of {source}: {error}") from error
        tokens.append(np.asarray(ids, dtype=np.int32))
        is_target.append(np.asarray(targets, dtype=bool))
        num_bytes.append(np.asarray(bytes_of, dtype=np.int32))
        lengths.append(len(ids))
    if not lengths:
        raise UserError(f"There are no examples in {source}.")
    return PackedText(
        np.concatenate(tokens),
        lengths,
        np.concatenate(num_bytes),
        np.concatenate(is_target),
        np.zeros(len(lengths), dtype=bool),
    )


def require_template(tokenizer) -> None:
    """Raise UserError for a tokenizer that cannot render chats."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(NO_TEMPLATE)


class _BadExample(Exception):
    """What is wrong with one example."""


def _encode_prompt(example: Mapping[str, Any], tokenizer) -> Encoded:
    prompt, completion = example["prompt"], example["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):  # both as messages
        return _encode_chat({"messages": [*prompt, *completion]}, tokenizer, first=len(prompt))
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise _BadExample("prompt and completion must both be text, or both lists of messages.")
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # of tokenizers that end every text
    answer, bytes_of = _with_bytes(completion, tokenizer)
    if tokenizer.eos_token_id is not None and answer[-1:] != [tokenizer.eos_token_id]:
        answer, bytes_of = [*answer, tokenizer.eos_token_id], [*bytes_of, 0]
    return [*ids, *answer], [False] * len(ids) + [True] * len(answer), [0] * len(ids) + bytes_of


def _encode_tokens(example: Mapping[str, Any], tokenizer) -> Encoded:
    ids = example["input_ids"]
    labels = example.get("labels")
    labels = ids if labels is None else labels
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise _BadExample("input_ids must be a list of token numbers.")
    if not isinstance(labels, list) or len(labels) != len(ids):
        raise _BadExample("labels must be a list as long as input_ids.")
    if any(label not in (IGNORED, token) for label, token in zip(labels, ids, strict=True)):
        raise _BadExample(f"a label must be the token of its own place, or {IGNORED}; the model shifts them itself.")
    if max(ids, default=0) >= len(tokenizer):
        raise _BadExample(f"token {max(ids)} is not among the {len(tokenizer)} of the tokenizer.")
    return ids, [label != IGNORED for label in labels], [0] * len(ids)  # how much text a token covers is not known


def _encode_chat(example: Mapping[str, Any], tokenizer, first: int = 0) -> Encoded:
    """first: the number of the first message that can be a target."""
    messages = example["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise _BadExample("messages must be a list of {role, content}.")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options = {"tools": example["tools"]} if example.get("tools") else {}
    text = _render(tokenizer, messages, **options)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    targets = _generation_blocks(tokenizer, messages, ids, options) if first == 0 else None
    if targets is None:
        spans = _assistant_spans(tokenizer, messages, text, first, options)
        targets = [any(start <= a and b <= end for start, end in spans) and a < b for a, b in offsets]
    if not any(targets):
        raise _BadExample("nothing in it was said by the assistant, so there is nothing to learn from it.")
    return ids, targets, bytes_per_token(text, offsets)


def _render(tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        raise _BadExample(f"the chat template cannot render it ({' '.join(str(error).split())}).") from error


def _generation_blocks(tokenizer, messages, ids: list[int], options: dict[str, Any]) -> list[bool] | None:
    """The targets that the template itself marks, or None where it marks none or they do not fit the tokens."""
    if "generation" not in str(tokenizer.chat_template):
        return None
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    mask = encoded["assistant_masks"]
    return [bool(m) for m in mask] if list(encoded["input_ids"]) == ids and any(mask) else None


def _assistant_spans(tokenizer, messages, text: str, first: int, options) -> list[tuple[int, int]]:
    """From which to which character the assistant speaks, by rendering the chat up to each of its turns.

    What it says begins where the prompt for it ends, and ends where the next turn begins.
    """
    spans = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or index < first:
            continue
        before = _render(tokenizer, messages[:index], add_generation_prompt=True, **options) if index else ""
        after = _render(tokenizer, messages[: index + 1], **options)
        if not after.startswith(before) or not text.startswith(after):
            raise _BadExample(
                f"the chat template changes earlier turns when message {index + 1} is added, so what the assistant "
                "said cannot be told apart: use a template with generation blocks (data.chat_template)."
            )
        spans.append((len(before), len(after)))
    return spans


def _with_bytes(text: str, tokenizer) -> tuple[list[int], list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    ids = encoded["input_ids"]
    return ids, bytes_per_token(text, encoded["offset_mapping"]) if tokenizer.is_fast else [0] * len(ids)
