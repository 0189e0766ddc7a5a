"""The demonstration, end to end, on a tiny model."""

import json
import sys

from training_tools import byte_tokenizer, checkpoint

from transformer2_cli import demo


def test_the_whole_job(tmp_path, monkeypatch, capsys):
    base = checkpoint(tmp_path / "base", residual=None, vocab_size=260, num_attention_heads=4, eos_token_id=0)
    byte_tokenizer().save_pretrained(base)
    monkeypatch.setattr(demo, "STEPS", 2)
    monkeypatch.setattr(demo, "SEQUENCE_LENGTH", 64)
    monkeypatch.setattr(demo, "EVAL_TOKENS", 256)
    monkeypatch.setattr(sys, "argv", ["demo", "--model", str(base), "--out", str(tmp_path / "out")])
    demo.main()
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["model"] for row in rows] == [
        "base (base)",
        "ddl, converted",
        "ddl, fine-tuned",
        "short_swa, converted",
        "short_swa, fine-tuned",
    ]
    start = rows[0]["perplexity"]
    assert rows[1]["perplexity"] == rows[3]["perplexity"] == start  # the same function
    assert rows[2]["perplexity"] != start
    assert rows[4]["perplexity"] != start
    assert rows[1]["parameters"] > rows[0]["parameters"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count(demo.PROMPT) == 1
    assert f"{start:.4f}" in shown.out
    assert "Verification L3" in shown.err
    assert json.loads((tmp_path / "out" / "ddl" / "verification.json").read_text())["passed"]


def test_speed_is_the_median_after_a_warm_up(tmp_path, monkeypatch):
    model = checkpoint(tmp_path / "model", residual=None)
    times = iter([0.0, 100.0, 0.0, 1.0, 0.0, 2.0, 0.0, 90.0])  # the warm-up, and three passes
    monkeypatch.setattr(demo, "TIMED_PASSES", 3)
    monkeypatch.setattr(demo, "SEQUENCE_LENGTH", 64)
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(times))
    assert demo.tokens_per_second(model, "float32") == 64 / 2.0


def test_held_out_text_is_not_trained_on(tmp_path):
    train, held_out = (
        {json.loads(line)["text"] for line in file.read_text().splitlines()} for file in demo.write_text(tmp_path)
    )
    assert len(train) > 50
    assert len(held_out) > 5
    assert not train & held_out
