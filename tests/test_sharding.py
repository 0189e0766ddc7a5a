"""FSDP2 (torch's fully_shard) on two processes computes what one computes, for every residual and mixer.

With torch directly, because Accelerate falls back to plain data parallelism on a CPU; that we notice it is tested too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from helpers import CASES
from torch import nn

import transformer2.configs
from transformer2.errors import MachineError, UserError
from transformer2.training.sharding import check_distribution, check_sharded

FEW = [("standard", "none"), ("ddl_identity_tc_ec", "swa_identity"), ("mudd", "conv_qkv"), ("attn_res", "canon")]

WORKER = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformer2 import Transformer2ForCausalLM
from transformer2.training import state
from transformer2.training.launching import enable_checkpointing
from transformer2.training.sharding import check_sharded
from accelerate import DistributedType
from accelerate.commands.config.config_args import load_config_from_file
from types import SimpleNamespace
from helpers import LOCAL_MIXERS, RESIDUALS, tiny_model, tokens

def step(model, rows):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    whole = {n: state._whole(gradient) for n, gradient in gradients.items()}
    optimizer.step()
    return loss.detach(), whole

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
accelerator = SimpleNamespace(num_processes=2, distributed_type=DistributedType.FSDP)
found = {}
for residual, mixer in json.loads(sys.argv[2]):
    one, two = (tiny_model(RESIDUALS[residual], LOCAL_MIXERS[mixer]).double().train() for _ in range(2))
    enable_checkpointing(two)
    for layer in two.model.layers:
        fully_shard(layer)
    fully_shard(two)
    check_sharded(accelerator, two)
    rows = tokens(batch=4, length=10)
    loss, gradients = step(one, rows)
    mine, sharded = step(two, rows[2 * rank : 2 * rank + 2])
    dist.all_reduce(mine)
    names = [name for name, _ in one.named_parameters()]
    trained, expected = state.model_tensors(two, names), dict(one.named_parameters())
    assert sorted(trained) == sorted(expected) and len(gradients) == len(sharded)
    if rank == 0:  # the export is a folder like any other
        whole = tiny_model(RESIDUALS[residual], LOCAL_MIXERS[mixer], seed=5).double()
        state.load_model_tensors(whole, trained)
        whole.save_pretrained(folder)
        loaded = Transformer2ForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        with torch.no_grad():
            logits = (loaded(input_ids=rows).logits - one.eval()(input_ids=rows).logits).abs().max().item()
        found[f"{residual} {mixer}"] = {
            "loss": abs(loss - mine / 2).item(),
            "gradients": max((sharded[n] - g).abs().max().item() for n, g in gradients.items()),
            "largest gradient": max(g.abs().max().item() for g in gradients.values()),
            "stepped": max((trained[n] - p).abs().max().item() for n, p in expected.items()),
            "logits": logits,
        }
    dist.barrier()
if rank == 0:
    print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def check_cases(tmp_path, cases):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*launch, str(script), str(tmp_path / "out"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(cases)
    for case, errors in found.items():
        assert errors["largest gradient"] > 1e-3, case
        assert errors["loss"] < 2e-6, (case, errors)  # the loss is float32 whatever the model is
        assert errors["gradients"] < 1e-10, (case, errors)
        assert errors["stepped"] < 1e-9, (case, errors)
        # What `_keep_in_fp32_modules_strict` names is float32 in a loaded model, so the last digits go there.
        assert errors["logits"] < 1e-6, (case, errors)


def test_two_shards_compute_as_one(tmp_path):
    check_cases(tmp_path, FEW)


@pytest.mark.slow
def test_two_shards_compute_as_one_for_every_variant(tmp_path):
    check_cases(tmp_path, [case for case in CASES if case not in FEW])


def test_whole_parameters_are_noticed():
    accelerator = SimpleNamespace(num_processes=2, distributed_type=DistributedType.FSDP)
    with pytest.raises(MachineError, match="2 parameters are whole in every process, such as weight: check the wrap"):
        check_sharded(accelerator, nn.Linear(2, 2))
    zero3 = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    accelerator = SimpleNamespace(num_processes=2, distributed_type=DistributedType.DEEPSPEED, state=zero3)
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0
    with pytest.raises(MachineError, match="1 parameters are whole in every process, such as bias"):
        check_sharded(accelerator, model)
    model.bias.ds_id = 1
    check_sharded(accelerator, model)
    zero3.deepspeed_plugin.zero_stage = 2  # which shards gradients and optimiser only
    check_sharded(accelerator, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("variable", "kind"), [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED")]
)
def test_sharding_that_was_asked_for_and_is_not_there(monkeypatch, variable, kind):
    monkeypatch.setenv(variable, "true")
    accelerator = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    with pytest.raises(MachineError, match=f"asked for {kind}, and Accelerate uses MULTI_CPU, which shards nothing"):
        check_distribution(accelerator)


def test_fsdp_1_is_refused():
    with pytest.raises(UserError, match="set fsdp_version: 2, as configs/accelerate/fsdp2.yaml does"):
        check_distribution(SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False))


CONFIGS = Path(transformer2.configs.__file__).parent / "accelerate"


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [("one_gpu", "NO", 1), ("ddp", "MULTI_GPU", 8), ("fsdp2", "FSDP", 8), ("zero3", "DEEPSPEED", 8)],
)
def test_the_launcher_reads_the_shipped_configurations(name, kind, processes):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes) == (DistributedType[kind], processes)


LAUNCHED = """
import functools
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from helpers import tiny_model
from transformer2.modeling_transformer2 import Transformer2DecoderLayer
from transformer2.training.sharding import check_distribution

plugin, model = FullyShardedDataParallelPlugin(), tiny_model("ddl")
plugin.set_auto_wrap_policy(model)
policy = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
print(plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing)
print(set(policy) == {Transformer2DecoderLayer}, {type(model.model.layers[0])} == set(policy))
check_distribution(Accelerator(cpu=True))
"""


def test_fsdp2_cuts_at_our_layers_and_a_machine_that_cannot_shard_says_so(tmp_path):
    (tmp_path / "launched.py").write_text(LAUNCHED)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / "fsdp2.yaml")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*launch, "--num_processes", "1", str(tmp_path / "launched.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.stdout.splitlines()[:2] == ["2 True False", "True True"], done.stderr
    assert done.returncode != 0
    assert "The launcher was asked for FSDP, and Accelerate uses" in done.stderr
