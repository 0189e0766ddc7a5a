"""`transformer2 chat`."""

import io
import sys

import pytest
from training_tools import IDENTITY_DDL, checkpoint, command, word_tokenizer

from transformer2.errors import UserError
from transformer2.training import generate
from transformer2.training.generation import Conversation, Generator

# Roles become words, and a system message may stand at the start only.
FORMAT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('the system prompt comes first') }}{% endif %}"
    "{{ {'system': 'w10', 'user': 'w11', 'assistant': 'w12'}[m.role] }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w12{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    import torch

    folder = checkpoint(tmp_path / "model", IDENTITY_DDL, dtype=torch.float32, noise=0.3)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = FORMAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(model, monkeypatch, capsys):
    """Runs the command with these lines on standard input: exit code, standard output and error."""

    def run(lines: list[str], *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return command(monkeypatch, capsys, "chat", model, "--max-new-tokens", 4, *arguments)

    return run


def test_every_answer_follows_from_the_whole_conversation(chat, model):
    code, out, error = chat(["w3", "", "w4 w5"], "--system", "w6")
    assert code == 0, error
    first, second = out.strip().splitlines()
    assert first == generate(model, "w10 w6 w11 w3 w12", max_new_tokens=4)
    assert second == generate(model, f"w10 w6 w11 w3 w12 {first} w11 w4 w5 w12", max_new_tokens=4)
    assert error.count("tokens/s") == 2


def test_a_conversation_is_cleared_and_ended(chat, model):
    code, out, error = chat(["w3", "/clear", "w3", "/exit", "w4"])
    assert code == 0
    alone = generate(model, "w11 w3 w12", max_new_tokens=4)
    assert out.strip().splitlines() == [alone, alone]
    assert "(a new conversation)" in error


def test_sampling_follows_its_seed(chat):
    lines = ["w3", "w4"]
    draws = [chat(lines, "--temperature", 2, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    same = chat(["w3", "/clear", "w3"], "--temperature", 5, "--seed", 1)[1].strip().splitlines()
    assert same[0] != same[1]  # the seed starts the conversation, not every answer


def test_a_conversation_that_outgrows_the_context_stays_as_it_was(model):
    conversation = Conversation(Generator(model))
    conversation.say("w3", max_new_tokens=3)
    before = list(conversation.messages)
    with pytest.raises(UserError, match="shorten it"):
        conversation.say(" ".join(["w4"] * 300))
    assert conversation.messages == before


def test_what_goes_wrong_is_said_in_one_sentence(chat, model, monkeypatch):
    code, out, error = chat([" ".join(["w4"] * 300)])
    assert (code, out) == (2, "")
    assert "the model's context is 256" in error
    assert chat(["w3"], "--attn", "magic")[0] == 2
    assert chat(["w3"], "--max-new-tokens", 0)[0] == 2
    with pytest.raises(UserError, match="refuses this conversation: the system prompt comes first"):
        Generator(model).encode_chat([{"role": "user", "content": "w3"}, {"role": "system", "content": "w4"}])
    word_tokenizer().save_pretrained(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    code, out, error = chat(["w3"])
    assert (code, out) == (2, "")
    assert "no chat format" in error


def test_ctrl_c_ends_a_chat_with_one_sentence(chat, monkeypatch):
    def interrupt(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    code, out, error = chat([])
    assert (code, out) == (130, "")
    assert "Interrupted" in error
