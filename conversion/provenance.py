"""Where a converted model comes from, in its record, its config and its README; never a path of this machine."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import transformer2
from transformer2.conversion.checkpoints import INDEX_NAME, PROVENANCE, file_sha256
from transformer2.conversion.files import write_text
from transformer2.conversion.llama_sources import LlamaSource
from transformer2.conversion.shards import read_header_text
from transformer2.conversion.sources import Source

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")  # metadata of the source's README
BASE_README = "BASE_README.md"


def origin_of(origin: Source) -> dict[str, Any]:
    """What config.json says about it, in the field `converted_from`."""
    return {"name": origin.name, "commit": origin.commit, "transformer2": transformer2.__version__}


def original(llama: LlamaSource, hashed: bool) -> dict[str, Any]:
    """What `strip` needs besides the tensors to give the source back, to the byte: its config, index and headers.

    hashed: also the hashes of the shards, where the list of files does not have them.
    """
    checkpoint = llama.checkpoint
    names = (name for name in ("config.json", INDEX_NAME) if (checkpoint.folder / name).is_file())
    return {
        "files": {name: (checkpoint.folder / name).read_bytes().decode() for name in names},
        "headers": {shard.name: read_header_text(shard) for shard in checkpoint.shards},
        **({"sha256": {shard.name: file_sha256(shard) for shard in checkpoint.shards}} if hashed else {}),
    }


def command(origin: Source, plan: dict[str, Any]) -> str:
    """The command line that converts likewise, with OUT for the output. plan: the options of the conversion."""
    words = ["transformer2", "convert", origin.name, "OUT"]
    words += ["--revision", origin.commit] if origin.commit else []
    for axis in ("residual", "local_mixer"):
        options = dict(plan[axis])
        words += [f"--{axis.replace('_', '-')}", options.pop("type")]
        for key, value in options.items():
            words += ["--set", f"{axis}.{key}={json.dumps(value)}"]
    words += ["--seed", str(plan["seed"])]
    words += ["--dtype", plan["dtype"]] if plan["dtype"] else []
    words += ["--max-shard-size", str(plan["max_shard_bytes"])] if plan["max_shard_bytes"] else []
    words += ["--assume-tied"] if plan["assume_tied"] else []
    return shlex.join(words)


def write_readme(target: Path, folder: Path, origin: Source, plan: dict[str, Any]) -> None:
    """README.md: the licence metadata of the source's, its name as `base_model`, and where to read more.

    folder: the source's.
    """
    import yaml

    metadata = {key: value for key, value in readme_metadata(folder).items() if key in CARRIED}
    metadata |= {"library_name": "transformers", "tags": ["transformer2"]}
    if origin.commit is not None:
        metadata |= {"base_model": origin.name, "base_model_relation": "finetune"}
    variants = " and ".join(
        f"{axis.replace('_', ' ')} `{plan[axis]['type']}`"
        for axis, plain in (("residual", "standard"), ("local_mixer", "none"))
        if plan[axis]["type"] != plain
    )
    commit = f" (commit {origin.commit})" if origin.commit else ""
    text = (
        f"# {origin.name.rpartition('/')[2]}, converted\n\n"
        f"{origin.name}{commit}, converted by transformer2 {transformer2.__version__}"
        f"{f' to the {variants}' if variants else ''}. Load it with `trust_remote_code=True`.\n\n"
        f"`{PROVENANCE}` lists every file with its hash, and the command; `verification.json` says what was proved."
    )
    if (folder / "README.md").is_file():
        text += f" The source's own description is in `{BASE_README}`."
    header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    write_text(target, f"---\n{header}---\n\n{text}\n")


def readme_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's README.md; nothing where there is none, or it is broken."""
    import yaml

    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        match = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---\s*(\n|$)", text, re.DOTALL)
        metadata = yaml.safe_load(match[1]) if match else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}
