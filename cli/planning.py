"""Commands before and after a conversion: plan and strip. Results go to stdout, everything else to stderr."""

from typing import Annotated, Any

import typer

from .conversion import (
    AsJson,
    LocalMixer,
    Preset,
    Residual,
    Revision,
    Settings,
    StreamLayers,
    parse_settings,
    print_json,
    progress_bar,
    say,
)


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command()(plan)
    app.command()(strip)


def plan(
    source: Annotated[str, typer.Argument(help="A Llama or a relative: a folder, or a model on the Hub.")],
    residual: Residual = None,
    local_mixer: LocalMixer = None,
    preset: Preset = None,
    settings: Settings = None,
    revision: Revision = None,
    assume_tied: Annotated[
        bool, typer.Option("--assume-tied", help="The source shares its embeddings, though its config denies it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what `convert` would do, from headers alone, without download; exit code 1 if it would refuse."""
    choices = parse_settings(residual, local_mixer, settings or [], preset)
    from transformer2 import conversion
    from transformer2.errors import CheckFailed

    result = conversion.plan(source, **choices, revision=revision, assume_tied=assume_tied)
    if as_json:
        print_json(result)
    if not result["possible"]:
        raise CheckFailed(f"This cannot be converted: {result['refusal']}")
    if not as_json:
        _show(result)


def strip(
    folder: Annotated[str, typer.Argument(help="The converted folder, trained or not.")],
    output: Annotated[str, typer.Argument(help="The folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    stream_layers: StreamLayers = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the plain checkpoint: the source byte for byte, or an equal export; exit code 1 if there is none."""
    from transformer2 import conversion

    with progress_bar() as tell:
        report = conversion.strip(folder, output, overwrite=overwrite, stream_layers=stream_layers, progress=tell)
    for warning in report["warnings"]:
        say(f"Note: {warning}")
    if as_json:
        print_json(report)
        return
    if "logits" in report:
        proof = f"an export that computes the same on {len(report['logits'])} checks"
    else:
        proof = "every file has its old bytes" if report["identical"] else "every tensor has its old bytes"
    print(f"{report['output']}: {report['tensors']} tensors; {proof}.")


def _show(result: dict[str, Any]) -> None:
    origin, memory, cache = result["source"], result["memory"], result["cache"]
    per_layer = sorted(set(result["new_parameters_by_layer"]))
    share = f"{per_layer[0]:,}" if len(per_layer) == 1 else f"{per_layer[0]:,} to {per_layer[-1]:,}"
    elsewhere = result["new_parameters_elsewhere"]
    rows = [
        ("source", origin["name"] + (f" at {origin['commit']}" if origin["commit"] else "")),
        (
            "family",
            f"{result['family']}, {result['layers']} layers, {result['base_parameters']:,} parameters, "
            f"{result['dtype']}, {_bytes(result['base_bytes'])} in {result['shards']} shard(s)",
        ),
        ("residual", _choice(result["residual"])),
        ("local mixer", _choice(result["local_mixer"])),
        (
            "new parameters",
            f"{result['new_parameters']:,}: {share} per layer" + (f", {elsewhere:,} elsewhere" if elsewhere else ""),
        ),
        (
            "to write",
            f"{_bytes(result['bytes_to_write']['link'])} (link, reflink) "
            f"or {_bytes(result['bytes_to_write']['copy'])} (copy)",
        ),
        (
            "memory",
            f"{_bytes(memory['convert'])} to convert; to prove {_bytes(memory['verify'])} at once, or "
            f"{_bytes(memory['verify_by_layer'])} layer by layer",
        ),
        ("extra FLOPs", f"{result['extra_flops_per_token']:,} per token, {result['extra_flops_share']:+.2%}"),
        (
            "extra cache",
            f"{_bytes(cache['extra_per_sequence'])} per sequence, beside {_bytes(cache['keys_and_values_per_token'])} "
            "of keys and values per token",
        ),
        ("starts as", f"{result['expected_start']}; provable up to {result['expected_level']}"),
        *(("note", warning) for warning in result["warnings"]),
    ]
    for name, value in rows:
        print(f"{name:<15} {value}")


def _choice(choice: dict[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in choice.items() if key != "type" and value is not None)
    return choice["type"] + (f" ({options})" if options else "")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError
