"""From files or a data set to a list of documents (strings), and to tokens."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from transformer2.conversion.paths import user_path
from transformer2.errors import UserError
from transformer2.training.packing import PackedText

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".text")
TABLE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def read_documents(
    sources: str | Path | list[str],
    text_column: str = "text",
    separator: str | None = None,
    split: str = "train",
    name: str | None = None,
) -> list[str]:
    """The documents of files (text, JSONL, parquet), folders of them or hub data sets, in order, empty ones left out.

    text_column: where the text of a table or data set is. separator: what stands between the documents of a text file
    (None: the file is one document). split, name: which part of a data set.
    Raises UserError for a source that is missing, unreadable or has no such column, and where no text is left.
    """
    documents = []
    for source in [sources] if isinstance(sources, str | Path) else sources:
        path = user_path(source)
        if is_text(path):
            text = _read_text(path)
            found = text.split(separator) if separator else [text]
        else:
            location = str(path) if path.exists() else str(source)
            found = column(open_table(location, separator, split, name), text_column, location)
        documents += [text for text in found if text and not text.isspace()]
    if not documents:
        raise UserError(f"There is no text in {sources}: every document is empty.")
    return documents


def tokenize(documents: list[str], tokenizer, *, count_bytes: bool = False) -> PackedText:
    """Documents -> their tokens, one after another, with the special tokens that the tokenizer always adds.

    With `count_bytes`, every token knows how many UTF-8 bytes of the text it covers.
    Raises UserError where that is asked of a slow tokenizer, which cannot tell.
    """
    if count_bytes and not tokenizer.is_fast:
        raise UserError("Bits per byte needs a fast tokenizer, and this checkpoint has a slow one.")
    tokens, num_bytes, lengths = [], [], []
    for batch in _batches(documents, 256):
        encoded = tokenizer(batch, return_attention_mask=False, return_offsets_mapping=count_bytes, verbose=False)
        for index, text in enumerate(batch):
            ids = encoded["input_ids"][index]
            tokens.append(np.asarray(ids, dtype=np.int32))
            lengths.append(len(ids))
            if count_bytes:
                num_bytes.append(np.asarray(bytes_per_token(text, encoded["offset_mapping"][index]), dtype=np.int32))
    return PackedText(np.concatenate(tokens), lengths, np.concatenate(num_bytes) if count_bytes else None)


def hold_out(text: PackedText, num_tokens: int, seed: int) -> tuple[PackedText, PackedText]:
    """Split about `num_tokens` tokens off: whole documents, picked by the seed, or the tail of a single document.

    -> the text to train on and the text held out. Raises UserError where nothing would be left to train on.
    """
    if num_tokens >= len(text):
        raise UserError(
            f"The training text has {len(text)} tokens, so {num_tokens} cannot be held out: lower data.eval_tokens or "
            "data.eval_fraction, or name a file as data.eval."
        )
    if len(text.lengths) == 1 and text.plain.all():
        return text.cut(len(text) - num_tokens)
    if len(text.lengths) == 1:
        raise UserError(
            "There is one example, which cannot be both trained on and held out: name a file as data.eval."
        )
    chosen, held = [], 0
    for document in np.random.default_rng(seed).permutation(len(text.lengths)):
        if held >= num_tokens or len(chosen) == len(text.lengths) - 1:
            break
        chosen.append(int(document))
        held += text.lengths[document]
    rest = sorted(set(range(len(text.lengths))) - set(chosen))
    held_out = text.select(sorted(chosen))
    return text.select(rest), held_out.head(num_tokens) if held_out.plain.all() else held_out


def bytes_per_token(text: str, offsets: list[tuple[int, int]]) -> list[int]:
    """How many UTF-8 bytes of `text` each token covers; they add up to the bytes up to the end of the last token.

    offsets: first and last-plus-one character of each token. A character that several tokens share counts for the
    first of them, and characters that the tokenizer left out (spaces, often) for the token after them.
    """
    byte_at = np.concatenate(([0], np.cumsum([len(character.encode("utf-8", "surrogatepass")) for character in text])))
    ends = np.maximum.accumulate([0, *(end for _, end in offsets)])
    return np.diff(byte_at[ends]).tolist()


def _batches(documents: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
        if "\0" in text:
            raise UserError(f"{path} is binary, not text: it holds zero bytes.")
        return text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {error.start} cannot be read): convert it to UTF-8 first."
        ) from None
    except OSError as error:
        raise UserError(f"Cannot read the text file {path}: {error.strerror}.") from None


def is_text(path: Path) -> bool:
    """Whether a file is text rather than a table. A folder is none, whatever is in it."""
    return path.suffix in TEXT_SUFFIXES or (path.is_file() and path.suffix not in TABLE_FORMATS)


def open_table(
    source: str, separator: str | None = None, split: str = "train", name: str | None = None, streaming: bool = False
):
    """A JSONL or parquet file, a data set folder, or a hub data set as a table of the library `datasets`.

    A folder of text files becomes a table with the one column "text". Raises UserError for what cannot be read.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(f"Reading {source} needs the package datasets: pip install 'transformer2[train]'.") from None

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it says of failures is in the error as well
    path = Path(source)
    if path.suffix in TABLE_FORMATS and not path.is_file():
        raise UserError(f"Cannot read the data file {source}: no such file.")
    try:
        if _holds_only_text(
            path
        ):  # a document per file, as if they were named one by one; the library would cut lines
            table = datasets.load_dataset("text", data_dir=source, split=split, sample_by="document")
            texts = [part for text in table["text"] for part in (text.split(separator) if separator else [text])]
            return _Folder(texts)
        if path.is_file():
            kind = TABLE_FORMATS[path.suffix]
            return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=streaming)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            table = datasets.load_from_disk(source)
            table = table[split] if isinstance(table, dict) else table
            return table.to_iterable_dataset() if streaming else table
        return datasets.load_dataset(source, name, split=split, streaming=streaming)
    except Exception as error:  # the library has a dozen kinds for "cannot read this", from pyarrow's to httpx's
        raise UserError(f"Cannot load the data set {source}: {_reason(error)}") from error


def column(table, text_column: str, source: str) -> list[str]:
    """The texts of a table. Raises UserError where it has none, or something else in that column."""
    if isinstance(table, _Folder):
        return table["text"]
    try:
        texts = list(table[text_column]) if text_column in table.column_names else None
    except Exception as error:
        raise UserError(f"Cannot load the data set {source}: {_reason(error)}") from error
    if texts is None:
        raise UserError(
            f"{source} has no column {text_column!r}; its columns are: {', '.join(table.column_names)}. "
            "Name the one with the text as data.text_column (or --text-column)."
        )
    for row, text in enumerate(texts, 1):
        if text is not None and not isinstance(text, str):
            raise UserError(
                f"The column {text_column!r} of {source} holds {type(text).__name__}, not text, in row {row}."
            )
    return texts


class _Folder(dict):
    """The texts of a folder of text files, whatever the column is called elsewhere."""

    def __init__(self, texts: list[str]):
        super().__init__(text=texts)
        self.column_names = ["text"]


def _holds_only_text(path: Path) -> bool:
    """Whether this is a folder of text files, without a table in it."""
    suffixes = {file.suffix for file in path.rglob("*") if file.is_file()} if path.is_dir() else set()
    return bool(suffixes & set(TEXT_SUFFIXES)) and not suffixes & {*TABLE_FORMATS, ".arrow", ".csv"}


def _reason(error: Exception) -> str:
    """Why the library could not read something, in one line."""
    cause = error.__cause__ or error
    if isinstance(cause, StopIteration):
        return "there are no rows in it."
    if isinstance(cause, UnicodeDecodeError):
        return "it is not UTF-8 text; convert it first."
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
