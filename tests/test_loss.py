"""The loss of a training step: chunks, the divergence from the original, and any way to cut a step up."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import IDENTITY_RESIDUALS, RESIDUALS, case, tiny_llama, tiny_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from training_tools import IDENTITY_DDL, IDENTITY_SHORT_SWA, checkpoint, documents, run_settings, word_tokenizer
from transformers import LlamaForCausalLM

from transformer2.errors import UserError
from transformer2.training import train
from transformer2.training.bypass import bypassed
from transformer2.training.loss import batch_loss, target_nats


def ragged_batch(seed: int = 1):
    """Two rows with holes in their labels."""
    ids = tokens(2, 24, seed=seed)
    labels = ids.clone()
    labels[0, :9] = labels[1, 5:20] = labels[1, 0] = -100
    return {"input_ids": ids}, labels


def stock_sum(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")


def grads(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("logits_at_once", [1, 700, 10**9])  # one position, seven, all
def test_chunks_give_the_loss_and_the_gradient_of_all_logits(logits_at_once, tied):
    model = tiny_model({"type": "ddl"}, tie_word_embeddings=tied).double().train()
    batch, labels = ragged_batch()
    expected = F.cross_entropy(
        model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    expected.backward()
    gradients = grads(model)
    loss = batch_loss(model, model, batch, labels, logits_at_once=logits_at_once)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12, msg=name)
    assert "forward" not in vars(model.lm_head)
    torch.testing.assert_close(target_nats(model(**batch).logits, labels).sum(), expected)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made meanwhile has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                Largest.elements = max(Largest.elements, tensor.numel())
        return result


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_no_tensor_grows_with_vocabulary_times_length(kl):
    found = {}
    for length in (64, 256):
        model = tiny_model(IDENTITY_DDL, vocab_size=4001, num_hidden_layers=1).train()
        ids = tokens(1, length, vocab_size=4001)
        Largest.elements = 0
        with Largest():
            batch_loss(model, model, {"input_ids": ids}, ids, kl=kl, logits_at_once=4001 * 8).backward()
        found[length] = Largest.elements
    assert found[64] == found[256] == 4001 * 32  # the head's own gradient; all logits would be 4001 * 256


def test_a_batch_without_targets_costs_nothing_and_has_a_gradient_of_zero():
    model = tiny_model().train()
    batch, labels = ragged_batch()
    loss = batch_loss(model, model, batch, torch.full_like(labels, -100))
    assert loss.item() == 0
    loss.backward()
    assert all((gradient == 0).all() for gradient in grads(model).values())


@pytest.mark.parametrize(
    ("residual", "mixer"),
    [
        *[(name, "none") for name in IDENTITY_RESIDUALS],
        ("standard", "swa_identity"),
        ("ddl_identity", "canon_identity"),
    ],
)
def test_bypassed_it_is_the_original_and_afterwards_itself_again(residual, mixer):
    model = case(residual, mixer)  # its new parameters are far from their start
    plain = tiny_model()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids = tokens()
    with torch.no_grad():
        own = model(ids).logits
        with bypassed(model):
            torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
        assert torch.equal(model(ids).logits, own)
        if (residual, mixer) != ("standard", "none"):
            assert not torch.allclose(own, plain(ids).logits, atol=1e-3)


@pytest.mark.parametrize("logits_at_once", [500, 10**9])
def test_the_divergence_is_that_from_the_original(logits_at_once):
    model = tiny_model(RESIDUALS["ddl_identity"], "none").train()
    plain = tiny_llama(scale=1.0)
    plain.load_state_dict(model.state_dict(), strict=False)
    batch, labels = ragged_batch()
    is_target = labels[:, 1:] != -100
    with torch.no_grad():
        p = (plain(**batch).logits[:, :-1][is_target] / 2).log_softmax(-1)
    logits = model(**batch, use_cache=False).logits
    q = (logits[:, :-1][is_target] / 2).log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum()
    assert divergence > 0.01
    expected = stock_sum(logits, labels) + 0.3 * 4 * divergence
    expected.backward()
    gradients = grads(model)
    loss = batch_loss(model, model, batch, labels, kl=0.3, temperature=2.0, logits_at_once=logits_at_once)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    for name, gradient in grads(model).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
    assert model.training


def test_the_divergence_keeps_a_model_near_its_original(tmp_path):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31]))
    model = checkpoint(tmp_path / "model", IDENTITY_DDL, IDENTITY_SHORT_SWA, dtype=torch.float32)
    ids = torch.tensor([word_tokenizer()(documents([20, 9, 31]).split("|")[2])["input_ids"]])

    def distance(kl):
        settings = run_settings(model, tmp_path / f"kl{kl}", tmp_path / "text.txt", steps=30)
        train({**settings, "loss": {"kl": kl}})
        from transformers import AutoModelForCausalLM

        before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (model, tmp_path / f"kl{kl}"))
        with torch.no_grad():
            p, q = before(ids).logits.log_softmax(-1), after(ids).logits.log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1).mean().item()

    near, far = distance(20.0), distance(0.0)
    assert near < 0.75 * far, (near, far)


def test_there_has_to_be_an_original(tmp_path):
    (tmp_path / "text.txt").write_text(documents([20, 9, 31]))
    settings = run_settings(checkpoint(tmp_path / "model"), tmp_path / "out", tmp_path / "text.txt", train="all")
    with pytest.raises(UserError, match="optimisation.train=all changes it"):
        train({**settings, "loss": {"kl": 0.1}})
    paper = run_settings(checkpoint(tmp_path / "paper", "ddl"), tmp_path / "out", tmp_path / "text.txt")
    with pytest.raises(UserError, match="needs a retrofit"):
        train({**paper, "loss": {"kl": 0.1}})
    with pytest.raises(UserError, match="must not be negative"):
        train({**paper, "loss": {"kl": -1}})


# One optimiser step of eight ragged rows, in float64: who computes it must not matter.
STEP = """
import json, sys, torch
from accelerate import Accelerator
from helpers import tiny_model
from training_tools import documents, word_tokenizer
from transformer2.training.data import tokenize
from transformer2.training.step import accumulate
from transformer2.training.packing import PackedText
from transformer2.training.settings import LossSettings

accelerator = Accelerator(cpu=True)
text = tokenize(documents([3, 17, 1, 9, 30, 2, 2, 25, 11, 6, 1, 1, 14, 20]).split("|"), word_tokenizer())
text.is_target[::3] = text.is_target[40:70] = False
rows = list(text.rows(16))[:8]
found = []
for size in map(int, sys.argv[1:]):
    for kl in (0.0, 0.5):
        model = tiny_model({"type": "ddl", "form": "identity"}, "none").double()
        wrapped = accelerator.prepare(model)
        loss = accumulate(accelerator, wrapped, rows, size, LossSettings(kl=kl))
        gradients = {name: p.grad.flatten().tolist() for name, p in model.named_parameters()}
        found.append({"targets": [row.num_targets for row in rows], "loss": loss, "gradients": gradients})
if accelerator.is_main_process:
    print(json.dumps(found))
accelerator.end_training()
"""


def test_a_step_is_the_same_as_1x8_as_8x1_and_on_two_processes(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(STEP)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    found = []
    for command in ([sys.executable, script, 8, 1], [*launch, script, 4]):
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=200)
        assert done.returncode == 0, done.stderr
        found += json.loads(done.stdout.splitlines()[-1])
    assert len(found[0]["targets"]) == 8
    assert len(set(found[0]["targets"])) > 3  # ragged
    for one, others in ((found[0], found[2::2]), (found[1], found[3::2])):  # without and with the divergence
        assert len(others) == 2
        for other in others:
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            for name, gradient in one["gradients"].items():
                torch.testing.assert_close(
                    torch.tensor(other["gradients"][name]), torch.tensor(gradient), rtol=1e-6, atol=1e-9, msg=name
                )


def test_the_loss_of_a_stock_llama_is_its_own():
    model = tiny_llama()
    batch, labels = ragged_batch()
    assert isinstance(model, LlamaForCausalLM)
    count = (labels[:, 1:] != -100).sum()
    expected = model(**batch, labels=labels).loss * count
    assert batch_loss(model, model, batch, labels).item() == pytest.approx(expected.item(), rel=1e-6)
