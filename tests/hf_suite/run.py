"""The library's own model tests, for every variant next to stock Llama. `make hf-suite` runs this.

    python tests/hf_suite/run.py [--only ddl mixer_swa] [--workers 2] [--out build/hf-suite]

Downloads the source distribution of the installed transformers with pip and takes its `test_modeling_common.py`.
Files that the distribution lacks (`generation/`, `exporters/`) are empty mixins: generation and export have tests of
our own. No variant may fail a test that Llama does not fail, or skip one that it passes, unless `REASONS` has it. Some
tests skip a part (heads without a cache) and count as skipped, for Llama too. Writes OUT/counts.md and .json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import transformers

HERE = Path(__file__).resolve().parent
MIXINS = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}
# Tests in which a variant is worse than Llama, and why that is right.
REASONS = {
    "test_keep_in_fp32_modules": "Llama keeps nothing in float32. Gates are in both lists on purpose: bfloat16 needs "
    "the strict one, and quantisers look at the other one alone",
}


def lay_out(folder: Path) -> None:
    """The package `upstream`, with the common tests of the installed version."""
    version = transformers.__version__
    archive = folder / f"transformers-{version}.tar.gz"
    if not archive.is_file():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "transformers"]
        subprocess.run([*command, "--dest", str(folder), f"transformers=={version}"], check=True)
    package = folder / "upstream"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    with tarfile.open(archive) as files:
        common = files.extractfile(f"transformers-{version}/tests/test_modeling_common.py").read()
    (package / "test_modeling_common.py").write_bytes(common)
    (package / "__init__.py").touch()
    for file, mixin in MIXINS.items():
        (package / file).parent.mkdir()
        (package / file).parent.joinpath("__init__.py").touch()
        (package / file).write_text(f"class {mixin}:\n    pass\n")


def run(folder: Path, only: list[str], workers: int) -> Path:
    """All tests, or those of some variants and of Llama; returns pytest's report."""
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider", "--tb=line"]
    suite = str(HERE / "suite.py")
    command += [f"{suite}::Test_{name}" for name in ("llama", *only)] if only else [suite]
    command += [f"--junitxml={report}", "-o", "addopts=", "--rootdir", str(folder)]
    paths = [str(folder), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=False)
    if not report.is_file():
        raise SystemExit("pytest ended without a report; see above.")
    return report


def outcomes(report: Path) -> dict[str, dict[str, str]]:
    """Variant -> test -> passed, failed or skipped."""
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        variant = case.get("classname").rpartition("Test_")[2]
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        known = found.setdefault(variant, {})
        known[case.get("name")] = "failed" if known.get(case.get("name")) == "failed" else outcome  # sub-tests
    return found


def differences(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Variant -> tests that it fails and Llama does not, or skips and Llama passes -> the reason, empty if none."""
    ranks = {"failed": 0, "skipped": 1, "passed": 2}
    wrong: dict[str, dict[str, str]] = {}
    for variant, tests in found.items():
        for test in sorted({*tests, *found["llama"]}):
            ours, theirs = tests.get(test, "skipped"), found["llama"].get(test, "skipped")
            if ranks[ours] < ranks[theirs]:
                wrong.setdefault(variant, {})[test] = REASONS.get(test, "")
    return wrong


def table(found: dict[str, dict[str, str]], wrong: dict[str, dict[str, str]]) -> str:
    lines = ["| variant | passed | skipped | failed | worse than Llama in |", "|---|---|---|---|---|"]
    for variant, tests in found.items():
        counts = [list(tests.values()).count(kind) for kind in ("passed", "skipped", "failed")]
        names = ", ".join(f"`{test}`" for test in wrong.get(variant, {}))
        lines.append(f"| {variant} | " + " | ".join(map(str, counts)) + f" | {names} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="VARIANT")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/hf-suite"))
    options = parser.parse_args()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lay_out(folder)
    found = outcomes(run(folder, options.only, options.workers))
    if not found.get("llama") or "passed" not in found["llama"].values():
        raise SystemExit("Llama itself passed nothing, so this says nothing about the variants.")
    wrong = differences(found)
    (folder / "counts.json").write_text(json.dumps({"outcomes": found, "differences": wrong}, indent=2))
    (folder / "counts.md").write_text(table(found, wrong) + "\n")
    print(table(found, wrong))
    unexplained = sorted({test for tests in wrong.values() for test, reason in tests.items() if not reason})
    if unexplained:
        raise SystemExit(f"Without a reason: {', '.join(unexplained)}.")
    for test in sorted({test for tests in wrong.values() for test in tests}):
        print(f"{test}: {REASONS[test]}.")
    print(f"{len(found) - 1} variants do as well as Llama.")


if __name__ == "__main__":
    main()
