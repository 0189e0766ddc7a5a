"""Verification finds what is wrong, at the level where it should, and says where."""

import errno
import json
import shutil

import pytest
import torch
from helpers import tiny_llama
from safetensors.torch import load_file, save_file

from transformer2 import Transformer2ForCausalLM
from transformer2.conversion import convert, verification, verify
from transformer2.conversion.checkpoints import read_header
from transformer2.conversion.liveness import check_liveness
from transformer2.conversion.probes import compare
from transformer2.errors import UserError

BASE, NEW = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    tiny_llama(tie_word_embeddings=True).save_pretrained(folder / "llama")
    mixer = {"type": "short_swa", "window": 8}
    convert(folder / "llama", folder / "out", residual="ddl", local_mixer=mixer, verify="L0")
    return folder


@pytest.fixture
def source(pair):
    return pair / "llama"


@pytest.fixture
def output(pair, tmp_path):
    return shutil.copytree(pair / "out", tmp_path / "out")


def edit(file, **changes):
    """Change tensors of a shard: a function of the old tensor, or None to drop it."""
    tensors = load_file(file)
    for name, change in changes.items():
        name = name.replace("__", ".")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change(tensors.get(name))
    save_file(tensors, file, metadata={"format": "pt"})


def failures(source, output, level, **options):
    result = verify(source, output, level, **{"fresh_process": False, **options})
    assert result["passed"] is (not result["failures"])
    assert json.loads((output / "verification.json").read_text()) == result
    return result["failures"]


def levels(found):
    return sorted({failure.split()[0] for failure in found})


def test_sound_conversion_passes(source, output, monkeypatch):
    monkeypatch.chdir(output.parent)
    result = verify(source, "out")
    assert result["passed"]
    assert result["level"] == "L3"
    assert [check["level"] for check in result["checks"]] == ["L0"] * 5 + ["L1"] * 2 + ["L2"] * 9 + ["L3"] * 2
    details = {check["name"]: check["detail"] for check in result["checks"]}
    # of each of 3 layers: query, key, value and norm of the mixer, which wait behind its zero output projection
    assert (
        details["step 0"] == "12 of 51 new tensors have no gradient yet, as documented: what they feed starts at zero"
    )
    assert details["step 2"] == "each of 51 new tensors has a gradient"
    figures = {check["name"]: check.get("figures") for check in result["checks"]}
    exact = {"bit_equal": True, "max_abs_diff": 0.0, "max_kl": 0.0, "top1_agreement": 1.0, "allowed": 0.0}
    assert figures["float32 long"] == {**exact, "tokens": 256}  # all the positions that this model has
    assert figures["float32 left_padded"] == {**exact, "tokens": 24 + 19 + 13}
    assert set(result["versions"]) == {"transformer2", "torch", "transformers"}


def test_flipped_bit_of_a_base_tensor(source, output):
    name = "model.layers.1.mlp.down_proj.weight"
    entry = read_header(output / BASE)[name]
    with open(output / BASE, "r+b") as shard:
        shard.seek(entry.start + 3)  # sign and exponent of the first float32
        byte = shard.read(1)[0]
        shard.seek(entry.start + 3)
        shard.write(bytes([byte ^ 0x80]))
    assert failures(source, output, "L0") == []
    assert failures(source, output, "L1") == [f"L1 tensor bytes: {name} has other bytes than in the source"]
    found = failures(source, output, "L2")
    assert levels(found) == ["L1", "L2"]
    assert len(found) == 1 + 7
    assert all("first in layer 1 " in failure for failure in found if failure.startswith("L2"))


def test_perturbed_new_parameter(source, output):
    edit(output / NEW, model__layers__2__attn_residual__rewrite__carry=lambda carry: carry + 2**-20)
    assert failures(source, output, "L1") == []
    found = failures(source, output, "L2")
    assert levels(found) == ["L2"]
    assert "L2 float32 short: logits differ by up to" in found[0]
    assert "first in layer 2 " in found[0]


def test_new_tensors_must_be_those_of_the_config(source, output):
    name = "model.layers.0.mlp_residual.rewrite.erase"
    edit(output / NEW, **{name.replace(".", "__"): None})
    assert "lists tensor" in failures(source, output, "L3")[0]
    index = json.loads((output / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    found = failures(source, output, "L3")
    assert levels(found) == ["L0"]  # logits of a model with random parts would say nothing
    assert f"L0 new tensors: {name} is missing" in found
    assert any(failure.startswith("L0 index: total_size") for failure in found)


def test_types_and_shapes(source, output):
    edit(output / BASE, model__norm__weight=lambda x: x.bfloat16())
    edit(output / NEW, model__layers__0__mlp_residual__rewrite__erase=lambda x: x.reshape(1, 1))
    found = failures(source, output, "L0")
    assert "L0 base tensors: model.norm.weight was F32 [32] and is BF16 [32]" in found
    assert any("erase should be torch.float32 [1], and is F32 [1, 1]" in failure for failure in found)


def test_lost_and_added_files(source, output):
    (output / "stray.bin").write_bytes(b"x")
    (output / "layers.py").unlink()
    (output / "README.md").write_text("a model card may be added")
    (failure,) = failures(source, output, "L1")
    assert failure == "L0 files: layers.py is missing, stray.bin is not part of the conversion"


def test_lost_provenance(source, output):
    (output / "transformer2_conversion.json").unlink()
    (failure,) = failures(source, output, "L1")
    assert failure == "L0 files: transformer2_conversion.json is missing or broken, so the files cannot be checked"


def test_folder_that_was_saved_again(source, output):
    Transformer2ForCausalLM.from_pretrained(output).save_pretrained(output.parent / "again")
    found = failures(source, output.parent / "again", "L1")
    assert found[0].startswith(
        "L0 index: model.safetensors.index.json is missing: this is not the folder as it was conv"
    )
    assert not any(failure.startswith(("L0 base", "L0 new", "L1")) for failure in found)  # which are as they were


def test_read_only_folder_can_be_verified(source, output, monkeypatch):
    def denied(file, value):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(verification, "write_json", denied)
    result = verify(source, output, "L0")
    assert result["passed"]
    assert result["notes"] == ["verification.json could not be written, because the folder may not be changed."]


def test_truncated_shard(source, output):
    content = (output / NEW).read_bytes()
    (output / NEW).write_bytes(content[:-8])
    (failure,) = failures(source, output, "L3")
    assert failure.startswith("L0 shards:")
    assert "truncated" in failure


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rope"),
    ],
)
def test_edited_config(source, output, changes, field):
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**config, **changes}))
    assert any(f.startswith("L0 config:") and field in f for f in failures(source, output, "L0"))


def test_config_that_does_not_load(source, output):
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps({**config, "residual": {"type": "magic"}}))
    assert failures(source, output, "L3")[0].startswith("L0 config: config.json does not load: Unknown residual type")


def test_another_source(output, tmp_path):
    tiny_llama(seed=1, tie_word_embeddings=True).save_pretrained(tmp_path / "other")
    found = failures(tmp_path / "other", output, "L2")
    assert levels(found) == ["L1", "L2"]


def test_code_that_does_not_load_alone(source, output):
    with open(output / "layers.py", "a") as file:
        file.write("\nimport transformer2\n")
    found = failures(source, output, "L2", fresh_process=True)
    assert len(found) == 2
    assert found[0].startswith("L0 files: layers.py has")
    assert found[1].startswith("L2 without the package: loading without the package failed:")
    assert "transformer2" in found[1]


def test_wrong_arguments(source, output, tmp_path):
    with pytest.raises(UserError, match="Unknown verification level 'L7'"):
        verify(source, output, "L7")
    with pytest.raises(UserError, match="There is no folder"):
        verify(source, tmp_path / "nowhere")
    with pytest.raises(UserError, match="no Transformer2 checkpoint"):
        verify(source, source)
    with pytest.raises(UserError, match="dequantised folder"):
        verify("model.gguf", output)


def swa(names):
    return sorted(f"model.layers.{i}.local_mixer.swa.{n}.weight" for i in range(3) for n in names)


def test_liveness_lists(source, output):
    expected = sorted(
        [*swa(("query", "key", "value")), *(f"model.layers.{i}.local_layernorm.weight" for i in range(3))]
    )
    new = list(read_header(output / NEW))
    result = check_liveness(output, new)
    assert result["dead_at_start"] == result["documented"] == expected
    assert result["dead_after_two_steps"] == result["idle"] == []
    assert result["as_documented"]
    assert result["all_alive"]
    assert result["losses"][2] < result["losses"][1] < result["losses"][0]


def test_idle_parameters_are_told_from_dormant_ones(source, tmp_path):
    output = tmp_path / "depth"
    convert(source, output, residual={"type": "short_swa", "share_weights": False}, verify="L0")
    result = check_liveness(output, list(read_header(output / NEW)))
    idle = [f"model.layers.0.attn_residual.mixture.swa.{name}.weight" for name in ("key", "query")]
    assert result["idle"] == result["dead_after_two_steps"] == idle
    outputs = {f"model.layers.{i}.attn_residual.mixture.swa.output.weight" for i in range(3)}
    assert set(result["dead_at_start"]) == set(read_header(output / NEW)) - outputs
    assert verify(source, output, "L3", fresh_process=False)["passed"]


def test_dead_branch_fails(source, output):
    edit(output / NEW, model__layers__1__local_mixer__swa__value__weight=torch.zeros_like)  # zero times zero
    assert failures(source, output, "L2") == []
    found = failures(source, output, "L3")
    names = [f"model.layers.1.local_mixer.swa.{name}.weight" for name in ("output", "query", "key", "value")]
    assert levels(found) == ["L3"]
    assert names[0] in found[0]
    assert "L3 step 2: without gradient" in found[1]


def test_awake_branch_is_not_as_documented(source, output):
    edit(output / NEW, model__layers__1__local_mixer__swa__output__weight=lambda x: x + 0.01)
    found = failures(source, output, "L3")
    assert levels(found) == ["L2", "L3"]
    assert "L3 step 0: not as documented" in found[-1]


def test_comparison_of_logits():
    expected = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert compare(expected, expected.clone())["bit_equal"]
    figures = compare(expected, torch.tensor([[2.0, 0.0], [1.0, 0.0]]))
    p = torch.tensor(1.0).sigmoid().item()
    kl = p * 1.0 - (1 - p) * 1.0  # log p - log(1 - p) = 1
    assert figures["max_abs_diff"] == 1.0
    assert figures["max_kl"] == pytest.approx(kl, rel=1e-6)
    assert figures["top1_agreement"] == 0.5
    assert not figures["bit_equal"]


def test_rounding_is_allowed_where_it_is_documented_and_no_more(source, tmp_path):
    """mHC starts as its source up to rounding; what is further away fails, and other variants get no allowance."""
    convert(source, tmp_path / "mhc", residual="mhc", verify="L0")
    result = verify(source, tmp_path / "mhc", "L2")
    assert result["passed"], result["failures"]
    details = {check["name"]: check["detail"] for check in result["checks"]}
    assert "equal up to rounding" in details["float32 long"]
    name = "model__layers__1__mlp_residual__connection__write_bias"
    edit(tmp_path / "mhc" / NEW, **{name: lambda x: x + 1e-2})
    found = failures(source, tmp_path / "mhc", "L2")
    assert any("L2 float32 short: logits differ" in failure for failure in found)
    convert(source, tmp_path / "hyper", residual="hyper_connections", verify="L0")
    name = "model__layers__1__mlp_residual__connection__write"
    edit(tmp_path / "hyper" / NEW, **{name: lambda x: x * (1 + 1e-6)})
    assert any("L2 float32" in failure for failure in failures(source, tmp_path / "hyper", "L2"))
