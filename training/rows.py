"""From the data settings to rows: what is trained on, and what is held out; all at once, or as a stream."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.training.data import column, hold_out, is_text, open_table, read_documents, tokenize
from transformer2.training.examples import KINDS, detect_kind, encode_examples, require_template
from transformer2.training.packing import PackedText, Row, Rows
from transformer2.training.settings import DataSettings, Settings

EXAMPLES_AT_ONCE = 2_000  # of a stream: what is packed and shuffled together


def load_rows(settings: Settings, tokenizer) -> "tuple[Rows | StreamedRows, Rows | None]":
    """The rows to train on, where texts end with the end-of-text token, and those held out: the bare text.

    Raises UserError for data that cannot be read, or in which nothing is left to learn.
    """
    data = settings.data
    seed = settings.optimisation.seed if data.hold_out_seed is None else data.hold_out_seed
    use_template(tokenizer, data.chat_template)
    splits = data.eval is None and (data.eval_tokens or data.eval_fraction)
    if data.streaming and splits:
        raise UserError("Nothing can be held out of a stream: name a file as data.eval, or set data.streaming=false.")
    held_out = None
    if data.eval is not None:
        held_out = load_text(data.eval, data, tokenizer, count_bytes=True)
        if held_out.plain.all():
            held_out = held_out.head(data.eval_tokens)
        elif data.eval_tokens:
            held_out = held_out.select(_first_documents(held_out, data.eval_tokens))
    if data.streaming:
        rows: Rows | StreamedRows = StreamedRows(data, tokenizer)
    else:
        text = load_text(data.train, data, tokenizer, count_bytes=bool(splits))
        if splits:
            text, held_out = hold_out(text, data.eval_tokens or math.ceil(data.eval_fraction * len(text)), seed)
        rows = text.with_end(tokenizer.eos_token_id).rows(data.sequence_length, data.packing)
    return rows, None if held_out is None else held_out.rows(data.sequence_length)


def use_template(tokenizer, template: str | None) -> None:
    """Give the tokenizer the chat template in a file, or of the model in a folder."""
    if template is None:
        return
    path = user_path(template)
    if path.is_dir():
        from transformer2.training.loading import load_tokenizer

        found = load_tokenizer(path).chat_template
        if not found:
            raise UserError(f"The tokenizer in {path} has no chat template: name another as data.chat_template.")
        tokenizer.chat_template = found
        return
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot read the chat template {path}: {error.strerror}.") from None


def load_text(sources: str | list[str], data: DataSettings, tokenizer, *, count_bytes: bool = False) -> PackedText:
    """Everything in files, folders and data sets, as tokens; each source may be of another kind."""
    parts = []
    for source in [sources] if isinstance(sources, str) else sources:
        table, kind, location = _open(source, data, streaming=False)
        if kind == "text":
            parts.append(_tokenize_text(source, table, location, data, tokenizer, count_bytes))
        else:
            if kind == "chat":
                require_template(tokenizer)
            parts.append(encode_examples(table, kind, tokenizer, location))
    return parts[0] if len(parts) == 1 else PackedText.join(parts)


def _tokenize_text(source, table, location: str, data: DataSettings, tokenizer, count_bytes: bool) -> PackedText:
    if table is None:
        documents = read_documents(source, separator=data.separator)
    else:
        documents = [text for text in column(table, data.text_column, location) if text and not text.isspace()]
        if not documents:
            raise UserError(f"There is no text in {location}: every document is empty.")
    return tokenize(documents, tokenizer, count_bytes=count_bytes)


def _open(source: str, data: DataSettings, streaming: bool) -> tuple[Any, str, str]:
    """-> table (None: a text file), kind, and what to call it in messages."""
    path = user_path(source)
    if is_text(path):
        if data.kind not in (None, "text"):
            raise UserError(f"{source} is a text file, which cannot hold {data.kind}: give a table, such as JSONL.")
        return None, "text", str(path)
    location = str(path) if path.exists() else str(source)
    table = open_table(location, data.separator, data.split, data.name, streaming)
    columns = table.column_names or list(next(iter(table), {}))  # a stream may not know its columns
    if missing := set(KINDS.get(data.kind or "", ())) - set(columns):
        raise UserError(
            f"{Path(location).name} is no data of kind {data.kind}: it lacks {', '.join(sorted(missing))}; its "
            f"columns are: {', '.join(columns)}."
        )
    return table, data.kind or detect_kind(columns, data.text_column, Path(location).name), location


def _first_documents(text: PackedText, num_tokens: int) -> list[int]:
    before = np.cumsum(text.lengths) - text.lengths
    return np.flatnonzero(before < num_tokens).tolist()


class StreamedRows:
    """Rows of tables that are read while training.

    A few thousand examples at a time are packed and shuffled, in an order that depends on the seed and their place
    alone. A step can be asked for again, or far ahead: the stream is read once more from its beginning.
    """

    count = None  # how many rows there are is not known

    def __init__(self, data: DataSettings, tokenizer):
        self.data, self.tokenizer, self.vocab_size = data, tokenizer, None
        self._place, self._rows, self._key = 0, iter(()), None
        self._first = next(self._blocks(), None)
        if self._first is None:
            raise UserError(f"There is nothing to learn in {data.train}.")

    def sample(self) -> Rows:
        """The first block."""
        return self._first

    def check_vocabulary(self, size: int) -> None:
        """Raise UserError, now or at a later block, for a token that a model with `size` of them does not know."""
        self.vocab_size = size
        self._first.check_vocabulary(size)

    def for_step(self, step: int, rows_per_step: int, seed: int) -> list[Row]:
        """The rows of optimiser step `step` (from 0)."""
        start = step * rows_per_step
        if self._key != seed or start < self._place:
            self._rows, self._place, self._key = self._endless(seed), 0, seed
        for _ in islice(self._rows, start - self._place):
            pass
        self._place = start + rows_per_step
        return list(islice(self._rows, rows_per_step))

    def _endless(self, seed: int) -> Iterator[Row]:
        epoch = 0
        while True:
            for number, rows in enumerate(self._blocks()):
                if self.vocab_size is not None:
                    rows.check_vocabulary(self.vocab_size)
                for index in np.random.default_rng((seed, epoch, number)).permutation(len(rows)):
                    yield rows[int(index)]
            epoch += 1

    def _blocks(self) -> Iterator[Rows]:
        data = self.data
        for source in [data.train] if isinstance(data.train, str) else data.train:
            table, kind, location = _open(source, data, streaming=True)
            if table is None or isinstance(table, dict):
                raise UserError(f"{source} is text, which cannot be streamed: set data.streaming=false.")
            if kind == "chat":
                require_template(self.tokenizer)
            examples = iter(table)
            while block := list(islice(examples, EXAMPLES_AT_ONCE)):
                text = self._encode(block, kind, location)
                if text is not None:
                    rows = Rows(text.with_end(self.tokenizer.eos_token_id), data.sequence_length, data.packing)
                    if len(rows):
                        yield rows

    def _encode(self, block: list[Mapping[str, Any]], kind: str, location: str) -> PackedText | None:
        if kind != "text":
            return encode_examples(block, kind, self.tokenizer, location)
        texts = [example.get(self.data.text_column) for example in block]
        texts = [text for text in texts if text and not text.isspace()]
        return tokenize(texts, self.tokenizer) if texts else None
