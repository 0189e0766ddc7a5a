"""From files to packed rows."""

import json
import re

import datasets
import numpy as np
import pytest
import torch
from helpers import tiny_model
from training_tools import byte_tokenizer, documents, word_tokenizer

from transformer2.errors import CheckFailed, UserError
from transformer2.training.data import bytes_per_token, hold_out, read_documents, tokenize
from transformer2.training.isolation import check_isolation
from transformer2.training.packing import PackedText, collate, order


def packed(lengths, **options):
    return tokenize(documents(lengths).split("|"), word_tokenizer(), **options)


def test_a_text_file_is_one_document_unless_a_separator_is_given(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo\n\n \n\nthree", encoding="utf-8")
    assert read_documents(file) == ["one\n\ntwo\n\n \n\nthree"]
    assert read_documents(file, separator="\n\n") == ["one", "two", "three"]


def test_jsonl_parquet_and_data_set_folders_give_the_same_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    expected = ["naïve text", "second"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in [*expected, ""]))
    table = datasets.Dataset.from_dict({"body": expected})
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    table.to_json(tmp_path / "folder" / "train.jsonl")
    for source in ("a.jsonl", "a.parquet", "saved", "folder"):
        assert read_documents(str(tmp_path / source), text_column="body") == expected
    assert read_documents([str(tmp_path / "a.jsonl"), str(tmp_path / "saved")], text_column="body") == expected * 2
    with pytest.raises(UserError, match="no column 'text'; its columns are: body, n"):
        read_documents(str(tmp_path / "a.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"body": "x"\nnot json')
    with pytest.raises(UserError, match="Cannot load the data set"):
        read_documents(str(tmp_path / "bad.jsonl"))


def test_unreadable_sources_are_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt is not UTF-8 text \(byte 2"):
        read_documents(tmp_path / "latin.txt")
    with pytest.raises(UserError, match="Cannot read the text file .*missing.txt: No such file"):
        read_documents(tmp_path / "missing.txt")
    with pytest.raises(UserError, match="missing.jsonl: no such file"):
        read_documents(tmp_path / "missing.jsonl")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UserError, match="no text"):
        read_documents(tmp_path / "empty.txt")


ODD_TABLES = {
    b'{"text": "a"}\n\n\n{"text": "b"}\n\n': ["a", "b"],
    b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n': ["a", "b"],
    b'{"text": "a"}\n{"other": "x"}\n{"text": null}\n{"text": "b"}': ["a", "b"],
    b'{"text": "' + b"x y " * 1_000_000 + b'"}\n{"text": "b"}': ["x y " * 1_000_000, "b"],
    b'{"text": "a"}\n{"text": 5}\n': "holds int, not text, in row 2.",
    b'{"text": ["a"]}\n': "holds list, not text, in row 1.",
    b'{"text": "na\xefve"}\n{"text": "b"}\n': "it is not UTF-8 text; convert it first.",
    b'{"text": "a"}\n{"text": "b': "Missing a closing quotation mark",
    b'"a"\n"b"\n': "Cannot load the data set",
    b'{"text": null}\n': "every document is empty",
    b"": "there are no rows in it.",
    b"\n\n": "Cannot load the data set",
}


@pytest.mark.parametrize("content", ODD_TABLES, ids=range(len(ODD_TABLES)))
def test_odd_tables(tmp_path, monkeypatch, capfd, content):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "odd.jsonl").write_bytes(content)
    expected = ODD_TABLES[content]
    if isinstance(expected, list):
        assert read_documents(tmp_path / "odd.jsonl") == expected
        return
    with pytest.raises(UserError) as error:
        read_documents(tmp_path / "odd.jsonl")
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""  # the library's own complaint would say it twice


def test_odd_parquet_files_and_places(tmp_path):
    datasets.Dataset.from_dict({"body": ["a"]}).to_parquet(tmp_path / "other.parquet")
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and so on")
    (tmp_path / "folder").mkdir()
    for name, reason in {
        "other.parquet": "has no column 'text'; its columns are: body",
        "empty.parquet": "Cannot load the data set",
        "broken.parquet": "Cannot load the data set",
        "folder": "Cannot load the data set",
        "none*.txt": "No such file",
        "none*.jsonl": "no such file",
        "x" * 300 + ".txt": "File name too long",
    }.items():
        with pytest.raises(UserError, match=re.escape(reason)) as error:
            read_documents(str(tmp_path / name))
        assert "\n" not in str(error.value)


def test_text_with_a_byte_order_mark_and_folders_of_text(tmp_path, monkeypatch):
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read_documents(tmp_path / "bom.txt") == ["hello"]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "folder").mkdir()
    for name, text in {"a.txt": "one\n\nmore", "b.txt": "two\nlines"}.items():
        (tmp_path / "folder" / name).write_text(text)
    assert read_documents(tmp_path / "folder") == ["one\n\nmore", "two\nlines"]  # not a document per line
    assert read_documents(tmp_path / "folder", separator="\n\n") == ["one", "more", "two\nlines"]


def test_the_bytes_of_all_tokens_add_up_to_the_text():
    text = "aé€ 𝄞 z"
    tokenizer = byte_tokenizer()
    encoded = tokenizer(text, return_offsets_mapping=True)
    counts = bytes_per_token(text, encoded["offset_mapping"])
    assert len(counts) == sum(counts) == len(text.encode()) == 13
    # one token per byte: the first token of a character stands for all its bytes
    assert counts == [1, 2, 0, 3, 0, 0, 1, 4, 0, 0, 0, 1, 1]
    spaced = "w3  w44 w5"  # the word tokenizer leaves spaces out: they count for the next word
    assert tokenize([spaced], word_tokenizer(), count_bytes=True).num_bytes.tolist() == [2, 5, 3]


def test_rows_restart_positions_and_mask_the_first_token_of_documents_and_rows():
    text = packed([5, 2, 4]).with_end(1)
    assert text.lengths == [6, 3, 5]
    assert text.tokens[[5, 8, 13]].tolist() == [1, 1, 1]
    rows = list(text.rows(8))
    assert [row.position_ids.tolist() for row in rows] == [[0, 1, 2, 3, 4, 5, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert [(row.labels == -100).nonzero()[0].tolist() for row in rows] == [[0, 6], [0, 1]]
    assert [row.num_targets for row in rows] == [6, 4]
    targets = rows[0].labels != -100
    assert (rows[0].labels[targets] == rows[0].input_ids[targets]).all()
    assert np.concatenate([row.input_ids for row in rows]).tolist() == text.tokens.tolist()


def test_short_texts_give_one_short_row_and_rows_without_targets_are_left_out():
    assert [len(row.input_ids) for row in packed([3]).rows(1024)] == [3]
    assert [len(row.input_ids) for row in packed([9]).rows(4)] == [
        4,
        4,
    ]  # the ninth token has no predecessor in its row
    with pytest.raises(UserError, match="nothing to predict"):
        packed([1, 1]).rows(8)


def test_the_end_is_not_doubled_and_cuts_keep_documents():
    text = PackedText(np.array([5, 1, 7, 8, 9], dtype=np.int32), [2, 3])
    assert text.with_end(1).tokens.tolist() == [5, 1, 7, 8, 9, 1]
    assert text.with_end(None) is text
    before, after = text.cut(3)
    assert (before.lengths, after.lengths) == ([2, 1], [2])
    assert text.head(2).lengths == [2]
    assert text.head(99).lengths == [2, 3]
    assert text.select([1]).tokens.tolist() == [7, 8, 9]


def test_a_part_is_held_out_by_document_or_from_the_tail():
    text = packed([10] * 6)
    kept, held = hold_out(text, 15, seed=3)
    assert (len(kept), len(held)) == (40, 15)
    whole = {tuple(text.tokens[i * 10 : i * 10 + 10]) for i in range(6)}
    assert {tuple(kept.tokens[i * 10 : i * 10 + 10]) for i in range(4)} < whole
    assert tuple(held.tokens[:10]) in whole - {tuple(kept.tokens[i * 10 : i * 10 + 10]) for i in range(4)}
    assert hold_out(text, 15, seed=3)[1].tokens.tolist() == held.tokens.tolist()
    single = packed([30])
    kept, held = hold_out(single, 8, seed=0)
    assert held.tokens.tolist() == single.tokens[22:].tolist()
    assert len(kept) == 22
    with pytest.raises(UserError, match="has 30 tokens, so 30 cannot be held out"):
        hold_out(single, 30, seed=0)


def test_the_order_of_the_rows_depends_on_seed_and_place_alone():
    steps = [order(step, 3, 7, seed=5) for step in range(14)]  # 42 places: six epochs of seven rows
    flat = sum(steps, [])
    assert all(sorted(flat[i : i + 7]) == list(range(7)) for i in range(0, 42, 7))
    assert flat[:7] != flat[7:14]
    assert order(9, 3, 7, seed=5) == steps[9]  # taken up in the middle
    assert sum((order(step, 6, 7, seed=5) for step in range(7)), []) == flat  # cut up differently
    assert order(0, 7, 7, seed=6) != flat[:7]


@pytest.mark.parametrize(
    ("residual", "local_mixer"),
    [
        ("standard", "none"),
        ({"type": "ddl", "value_channels": 2, "compress": "tokens"}, "none"),
        ("short_swa", {"type": "short_swa", "window": 4}),
    ],
)
def test_a_packed_batch_gives_every_document_the_logits_that_it_has_alone(residual, local_mixer):
    model = tiny_model(residual, local_mixer, num_hidden_layers=2)
    rows = list(packed([6, 5, 9, 2]).rows(16))
    batch = collate(rows)
    assert batch["input_ids"].shape == (2, 16)
    assert (batch["labels"][1, 6:] == -100).all()  # the shorter row was filled up
    del batch["labels"]
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits
        for row, begin, end in ((0, 0, 6), (0, 6, 11), (0, 11, 16), (1, 0, 4), (1, 4, 6)):
            alone = model(input_ids=batch["input_ids"][row : row + 1, begin:end], use_cache=False).logits[0]
            torch.testing.assert_close(together[row, begin:end], alone, rtol=1e-4, atol=1e-4)


def test_a_model_that_lets_documents_see_each_other_is_refused():
    model, rows = tiny_model(), packed([12, 9, 30]).rows(64)
    check_isolation(model, rows, torch.device("cpu"))

    class Leaky(torch.nn.Module):
        config = model.config

        def forward(self, input_ids, position_ids, use_cache):
            return model(input_ids=input_ids, use_cache=use_cache)  # positions never start again

    with pytest.raises(CheckFailed, match="Packed documents see each other"):
        check_isolation(Leaky(), rows, torch.device("cpu"))
    check_isolation(Leaky(), packed([12]).rows(64), torch.device("cpu"))  # one document: nothing to keep apart


def test_zero_bytes_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="a.txt is binary, not text: it holds zero bytes"):
        read_documents(tmp_path / "a.txt")
