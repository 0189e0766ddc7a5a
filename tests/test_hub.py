"""A saved folder works without this package: what travels, and that it loads in a fresh process."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import CASES, LOCAL_MIXERS, RESIDUALS, SIZE, case, tokens

import transformer2
from transformer2 import Transformer2Config

MODELING = Path(transformer2.__file__).parent
ALLOWED = {"torch", "transformers", *sys.stdlib_module_names} - {
    "os",
    "sys",
    "io",
    "pathlib",
    "shutil",
    "subprocess",
    "socket",
    "urllib",
    "http",
    "ssl",
    "tempfile",
    "importlib",
    "pickle",
    "ctypes",
    "multiprocessing",
    "threading",
}
BANNED_CALLS = {"eval", "exec", "compile", "open", "__import__", "input", "breakpoint", "globals", "print"}


def closure(entry: str) -> dict[str, ast.Module]:
    """The files that travel with `entry`: Python's relative imports, which must be what transformers' regex sees."""
    trees, todo = {}, [entry]
    while todo:
        name = todo.pop()
        if name in trees:
            continue
        source = (MODELING / f"{name}.py").read_text()
        trees[name] = tree = ast.parse(source)
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert all(n.level == 1 and n.module and "." not in n.module for n in imports), name
        seen = set(re.findall(r"^\s*from\s+\.(\S+)\s+import", source, re.M))
        seen |= set(re.findall(r"^\s*import\s+\.(\S+)\s*$", source, re.M))
        assert seen == {n.module for n in imports}, name
        todo += seen
    return trees


TRAVELLING = closure("modeling_transformer2") | closure("configuration_transformer2")


@pytest.mark.parametrize("name", sorted(TRAVELLING))
def test_travelling_files_are_harmless(name):
    tree = TRAVELLING[name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module.split(".")[0] in ALLOWED
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS
            if node.func.id == "isinstance":  # a local folder holds two copies of the configuration class
                assert "Config" not in ast.unparse(node.args[1])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save"), ("torch", "hub")}
    effects = [n for n in tree.body if isinstance(n, ast.Expr) and not isinstance(n.value, ast.Constant)]
    effects += [n for n in tree.body if isinstance(n, ast.For | ast.While | ast.With | ast.If | ast.Delete)]
    assert not effects  # importing them does nothing but define


def test_what_stays_at_home():
    assert not {"errors", "__init__", "__main__"} & set(TRAVELLING)


FRESH = """
import json, sys
sys.modules["transformer2"] = None  # as if it were not installed
sys.modules["transformer2_cli"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
torch.set_num_threads(1)
for folder, expected in json.load(open(sys.argv[1])).items():
    reference = torch.tensor(expected["logits"])
    ids = torch.tensor(expected["ids"])
    model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert torch.equal(model.eval()(ids).logits, reference), folder
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(model.lm_head(base(ids).last_hidden_state), reference), folder
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).residual == expected["residual"]
    out = [model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False)]
    assert torch.equal(*out), folder
    model.save_pretrained(folder + "-again")
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True).eval()
    assert torch.equal(again(ids).logits, reference), folder
print("ok")
"""


def run_fresh(script: str, *arguments: str, home: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=home,
        env={"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("ok")


def test_every_variant_loads_without_the_package(tmp_path):
    expected = {}
    for residual, mixer in CASES:
        model = case(residual, mixer)
        folder = tmp_path / f"{residual}-{mixer}"
        model.save_pretrained(folder)
        with torch.no_grad():
            logits = model(tokens()).logits
        expected[str(folder)] = {
            "ids": tokens().tolist(),
            "logits": logits.tolist(),
            "residual": model.config.residual,
        }
        files = {path.stem for path in folder.glob("*.py")}
        assert files == set(TRAVELLING)
        auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
        assert auto_map["AutoConfig"] == "configuration_transformer2.Transformer2Config"
        assert auto_map["AutoModel"] == "modeling_transformer2.Transformer2Model"
        assert auto_map["AutoModelForCausalLM"] == "modeling_transformer2.Transformer2ForCausalLM"
        assert len(auto_map) == 6
    (tmp_path / "expected.json").write_text(json.dumps(expected))
    run_fresh(FRESH, str(tmp_path / "expected.json"), home=tmp_path)


def test_the_other_heads_travel_too(tmp_path):
    config = {**SIZE, "residual": RESIDUALS["ddl_cc"], "local_mixer": LOCAL_MIXERS["swa"], "num_labels": 3}
    for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        torch.manual_seed(0)
        model = getattr(transformer2, f"Transformer2For{head}")(Transformer2Config(**config)).eval()
        model.save_pretrained(tmp_path / head)
        outputs = model(tokens(), use_cache=False, return_dict=False)
        torch.save(list(outputs), tmp_path / f"{head}.pt")
    script = """
import sys; sys.modules["transformer2"] = None
import torch, transformers
ids = torch.randint(1, 101, (2, 12), generator=torch.Generator().manual_seed(1))
for head in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
    auto = getattr(transformers, f"AutoModelFor{head}")
    model = auto.from_pretrained(head, trust_remote_code=True).eval()
    outputs, expected = model(ids, use_cache=False, return_dict=False), torch.load(f"{head}.pt")
    assert all(torch.equal(a, b) for a, b in zip(outputs[: len(expected)], expected)), head
print("ok")
"""
    run_fresh(script, home=tmp_path)
