"""A text to train on that every machine has: Python's documentation topics and the docstrings of installed packages.

    python benchmarks/corpus.py OUT.jsonl [--characters 4000000] [--packages numpy torch transformers]

Nothing is imported from the packages: their files are parsed. One document per topic, and one per module: its
docstrings in the order of the file. Documents shorter than 400 characters are left out, and doubles. Which packages
and versions the text is from goes to OUT.sources.json; other versions give another text, so compare runs on one
machine.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import pydoc_data.topics
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from transformer2.conversion.files import write_json

PACKAGES = ["accelerate", "datasets", "huggingface_hub", "numpy", "pandas", "peft", "torch", "transformers"]
SHORTEST = 400


def topics() -> Iterator[str]:
    """What `help("topic")` shows, for every topic."""
    for _, text in sorted(pydoc_data.topics.topics.items()):
        yield text.strip()


def docstrings(package: str) -> Iterator[str]:
    """For every module of an installed package: its docstrings, headed by what they are of."""
    folder = Path(importlib.util.find_spec(package).origin).parent
    for file in sorted(folder.rglob("*.py")):
        if "tests" in file.parts or "test" in file.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        parts = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    parts.append(f"{getattr(node, 'name', file.stem)}\n\n{text}")
        if parts:
            yield "\n\n\n".join(parts)


def build(out: Path, characters: int, packages: list[str], seed: int) -> dict:
    """Write documents of so many characters at least, in an order drawn by the seed; returns what it is from."""
    found = list(topics())
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"The package {package} is not installed: install it, or leave it out of --packages.")
        versions[package] = importlib.metadata.version(package)
        found += docstrings(package)
    found = list(dict.fromkeys(text for text in found if len(text) >= SHORTEST))
    random.Random(seed).shuffle(found)
    taken, size = [], 0
    for text in found:
        if size >= characters:
            break
        taken.append(text)
        size += len(text)
    out.write_text("".join(json.dumps({"text": text}) + "\n" for text in taken), encoding="utf-8")
    sources = {
        "documents": len(taken),
        "characters": size,
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        "seed": seed,
        "versions": versions,
    }
    write_json(out.with_suffix(".sources.json"), sources)
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--characters", type=int, default=4_000_000)
    parser.add_argument("--packages", nargs="+", default=PACKAGES)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(build(arguments.out, arguments.characters, arguments.packages, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
