"""Metrics of the library `evaluate`, and tasks of lm-evaluation-harness, without a network."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_tools import IDENTITY_SHORT_SWA, byte_tokenizer, checkpoint, command, word_tokenizer, words
from transformers import AutoModelForCausalLM

import transformer2  # noqa: F401
from transformer2.errors import MachineError, UserError
from transformer2.training import metrics, run_tasks

TEXTS = [words(9, 1), words(30, 2), words(17, 3)]


@pytest.fixture
def models(tmp_path):
    one = checkpoint(tmp_path / "one", "standard", IDENTITY_SHORT_SWA, dtype=torch.float32, seed=1)
    return one, checkpoint(tmp_path / "two", "standard", "none", dtype=torch.float32, seed=2)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """`evaluate.load` of one of our metrics, with caches of its own."""
    monkeypatch.setenv("HF_EVALUATE_OFFLINE", "1")
    import evaluate  # only now, as it reads the environment

    return lambda name: evaluate.load(metrics.path(name), cache_dir=str(tmp_path / "cache"), experiment_id=name)


def log_probabilities(folder, text):
    """[T - 1, V] of the tokens after the first, and those tokens."""
    ids = torch.tensor([word_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    return logits[0, :-1].double().log_softmax(-1), ids[0, 1:]


def test_likelihood_counts_every_token_alike(models, load):
    found = load("likelihood").compute(predictions=TEXTS, model=str(models[0]), rows_per_batch=2)
    nats = targets = 0
    for text in TEXTS:
        log_p, ids = log_probabilities(models[0], text)
        nats -= log_p[torch.arange(len(ids)), ids].sum().item()
        targets += len(ids)
    assert found["tokens"] == targets == 53
    assert found["nll"] == pytest.approx(nats / targets, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / targets), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-6)
    # Every word but the first of a text, with the space before it.
    assert found["bytes"] == sum(len(" " + word) for text in TEXTS for word in text.split()[1:])


def test_bits_per_byte_counts_all_bytes_of_other_alphabets(tmp_path, load):
    tokenizer = byte_tokenizer()
    model = checkpoint(tmp_path / "bytes", "standard", vocab_size=len(tokenizer), dtype=torch.float32)
    tokenizer.save_pretrained(model)
    found = load("likelihood").compute(predictions=["Gödel, Escher, Bach: 永遠の黄金の紐"], model=str(model))
    assert found["bytes"] == len("Gödel, Escher, Bach: 永遠の黄金の紐".encode()) - 1  # the first is not predicted


def test_agreement_with_the_base(models, load):
    found = load("base_agreement").compute(predictions=TEXTS, model=str(models[0]), base=str(models[1]))
    divergence, same, targets = 0.0, 0, 0
    for text in TEXTS:
        (log_p, ids), (base, _) = (log_probabilities(model, text) for model in models)
        divergence += (base.exp() * (base - log_p)).sum().item()
        same += (base.argmax(-1) == log_p.argmax(-1)).sum().item()
        targets += len(ids)
    assert found["tokens"] == targets
    assert found["kl"] == pytest.approx(divergence / targets, rel=1e-5)
    assert found["kl"] > 0.01
    assert found["top1_agreement"] == same / targets
    alike = load("base_agreement").compute(predictions=TEXTS, model=str(models[0]), base=str(models[0]))
    assert (alike["kl"], alike["top1_agreement"]) == (0, 1)
    assert alike["nll"] == alike["base_nll"] == pytest.approx(found["nll"], rel=1e-6)


def test_unknown_metrics():
    with pytest.raises(UserError, match="There is no metric 'bleu'; choose from: likelihood, base_agreement"):
        metrics.path("bleu")


def write_task(folder: Path, examples: list[dict]) -> Path:
    """A multiple-choice task on a local file."""
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    task = {
        "task": "which_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "which_word.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


EXAMPLES = [
    {"question": words(6, seed), "choices": words(3, 100 + seed).split(), "answer": seed % 3} for seed in range(12)
]
HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed: `make test-harness` does")
def test_a_local_task_of_the_harness(models, tmp_path):
    """The accuracy is what the probabilities of the choices say, for the model and for its base."""
    folder = write_task(tmp_path / "tasks", EXAMPLES)
    found = run_tasks(models[0], ["which_word"], against=models[1], task_folder=folder, batch_size=4)
    for key, model in (("tasks", models[0]), ("base", models[1])):
        right = 0
        for example in EXAMPLES:
            scores = [
                log_probabilities(model, f"{example['question']} {choice}")[0][-1][
                    word_tokenizer()(choice)["input_ids"][0]
                ]
                for choice in example["choices"]
            ]
            right += max(range(3), key=lambda i: scores[i]) == example["answer"]
        assert found[key]["which_word"]["acc"] == pytest.approx(right / len(EXAMPLES), abs=1e-9), key
    limited = run_tasks(models[0], ["which_word"], task_folder=folder, limit=2)
    assert limited["base"] is None
    assert limited["tasks"]["which_word"]["acc"] in (0, 0.5, 1)
    with pytest.raises(UserError, match="There is no task 'no_such_task'"):
        run_tasks(models[0], ["no_such_task"], task_folder=folder)
    (folder / "data.jsonl").unlink()
    with pytest.raises(MachineError, match="The data of a task could not be read"):
        run_tasks(models[0], ["which_word"], task_folder=folder)


@pytest.mark.skipif(not HARNESS, reason="lm-eval is not installed: `make test-harness` does")
def test_tasks_on_the_command_line(models, tmp_path, monkeypatch, capsys):
    folder = write_task(tmp_path / "tasks", EXAMPLES)
    options = ["--tasks", "which_word", "--task-folder", folder, "--against", models[1]]
    code, out, _ = command(monkeypatch, capsys, "eval", models[0], *options)
    assert code == 0
    assert out.splitlines()[0].split() == ["task", "metric", "model", "base"]
    assert out.splitlines()[1].split()[:2] == ["which_word", "acc"]


def test_tasks_without_the_harness_say_what_to_install(models, tmp_path):
    """In a process where lm-eval cannot be imported, whether it is installed or not."""
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from transformer2_cli import main\n"
        f"sys.argv = ['transformer2', 'eval', {str(models[0])!r}, '--tasks', 'arc_easy']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == MachineError.exit_code
    assert done.stderr.strip().endswith("pip install 'transformer2[harness]'.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Give either --text or --tasks"),
        (["--text", "a.txt", "--tasks", "b"], "Give either --text or --tasks"),
        (["--text", "a.txt", "--limit", "3"], "--task-folder and --limit are for --tasks"),
    ],
)
def test_options_that_do_not_go_together(models, monkeypatch, capsys, options, words):
    code, _, err = command(monkeypatch, capsys, "eval", models[0], *options)
    assert code == UserError.exit_code
    assert words in err
