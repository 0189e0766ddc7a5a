"""Commands around conversion: convert and verify. Results go to stdout, everything else to stderr."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PLAIN = {"residual": "standard", "local_mixer": "none"}
LEVEL_NAMES = {"L0": "structure", "L1": "bytes", "L2": "logits", "L3": "gradients", "L4": "quality"}
Level = Annotated[
    str,
    typer.Option(help="L0 structure, L1 bytes, L2 logits, L3 gradients, L4 quality; each includes those before it."),
]
StreamLayers = Annotated[
    bool | None,
    typer.Option(
        "--stream-layers/--whole",
        help="One layer of each network in memory at a time, or one network whole; by default whatever fits.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]

Residual = Annotated[
    str | None, typer.Option(help="Residual connection, see `transformer2 variants`.", show_default="the source's")
]
LocalMixer = Annotated[
    str | None, typer.Option(help="Local mixer, see `transformer2 variants`.", show_default="the source's")
]
Preset = Annotated[
    str | None,
    typer.Option(help="Recommended options: RESIDUAL[+LOCAL_MIXER]-SIZE, see `transformer2 variants --presets`."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="AXIS.KEY=VALUE", help="An option, e.g. residual.value_channels=4; repeatable."),
]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command()(convert)
    app.command()(verify)


def convert(
    source: Annotated[
        str, typer.Argument(help="A Llama or a relative: a folder, a model on the Hub, or a .gguf file.")
    ],
    output: Annotated[str, typer.Argument(help="The folder to make.")],
    residual: Residual = None,
    local_mixer: LocalMixer = None,
    preset: Preset = None,
    settings: Settings = None,
    level: Annotated[str, typer.Option("--verify", help="Proof required before the output appears: L0 to L4.")] = "L3",
    materialize: Annotated[
        str, typer.Option(help="How the base shards get there: auto (clone, else copy), link, reflink or copy.")
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(help="Cast the weights: float32, bfloat16 or float16.", show_default="keep"),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Cut the weights into files of at most this size, e.g. 5GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a conversion that was killed.")] = False,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(help="Seed of the new parameters.")] = 0,
    assume_tied: Annotated[
        bool, typer.Option("--assume-tied", help="The source shares its embeddings, though its config denies it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Convert a pretrained Llama (or Mistral, Qwen2, Qwen3, SmolLM3), unchanged in what it computes, and prove it."""
    choices = parse_settings(residual, local_mixer, settings or [], preset)
    from transformer2 import conversion
    from transformer2.errors import CheckFailed

    options = {
        "overwrite": overwrite,
        "resume": resume,
        "revision": revision,
        "seed": seed,
        "assume_tied": assume_tied,
    }
    options |= {"materialize": materialize, "dtype": dtype, "max_shard_size": max_shard_size}
    try:
        with progress_bar() as tell:
            report = conversion.convert(source, output, **choices, **options, verify=level, progress=tell)
    except CheckFailed as failed:
        if result := getattr(failed, "report", None):
            show_checks(result)
            if as_json:
                print_json({"output": None, "verification": result})
        raise
    for warning in report["warnings"]:
        say(f"Note: {warning}")
    show_checks(report["verification"])
    if as_json:
        print_json(report)
        return
    print(
        f"{report['output']}: {report['base_parameters']:,} parameters of {report['source']['name']}, "
        f"{report['new_parameters']:,} new ones, verified at {report['verification']['level']}."
    )
    if "dequantised" in report:
        print(f"The dequantised source is kept in {report['dequantised']}.")


def verify(
    source: Annotated[str, typer.Argument(help="What was converted: a folder or a model on the Hub.")],
    output: Annotated[str, typer.Argument(help="The converted folder.")],
    level: Level = "L3",
    stream_layers: StreamLayers = None,
    text: Annotated[str | None, typer.Option(help="A text file to score at L4; by default a sample.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Check a converted folder against its source; exit code 1 if something does not hold."""
    from transformer2 import conversion
    from transformer2.errors import CheckFailed

    options = {"revision": revision, "stream_layers": stream_layers, "text": text}
    with progress_bar() as tell:
        result = conversion.verify(source, output, level, **options, progress=tell)
    show_checks(result)
    for note in result["notes"]:
        say(f"Note: {note}")
    if as_json:
        print_json(result)
    if not result["passed"]:
        raise CheckFailed(f"{output} does not hold up: {result['failures'][0]}")
    if not as_json:
        print(f"{output}: all {len(result['checks'])} checks up to {result['level']} hold.")


def parse_settings(
    residual: str | None, local_mixer: str | None, settings: list[str], preset: str | None = None
) -> dict[str, dict[str, Any] | None]:
    """The two axes as dictionaries, from their types or a preset, and `axis.key=value` strings; None if not chosen.

    Raises typer.BadParameter.
    """
    if preset is not None:
        if residual is not None or local_mixer is not None:
            raise typer.BadParameter("leave --residual and --local-mixer out: it says both.", param_hint="--preset")
        from transformer2.configs import preset_variants

        try:
            choices = preset_variants(preset)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--preset") from error
    else:
        named = {"residual": residual, "local_mixer": local_mixer}
        choices = {axis: {"type": name} if name else None for axis, name in named.items()}
    for setting in settings:
        target, equals, value = setting.partition("=")
        axis, dot, key = target.strip().partition(".")
        axis = axis.replace("-", "_")
        if key == "type" and axis in choices:
            raise typer.BadParameter(f"the type is given by --{axis.replace('_', '-')} {value}.", param_hint="--set")
        if not equals or not dot or not key or axis not in choices:
            raise typer.BadParameter(
                f"{setting!r} should read residual.KEY=VALUE or local_mixer.KEY=VALUE.", param_hint="--set"
            )
        choices[axis] = choices[axis] or {"type": PLAIN[axis]}
        choices[axis][key] = parse_value(value.strip())
    return choices


def parse_value(text: str) -> Any:
    """A JSON value, or True, False, None and .5 as Python spells them, or a list of words; otherwise the string."""
    words = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        pass
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    return text


def say(message: str) -> None:
    """Tell the user something that is no result."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str], None]]:
    """What to tell each step to. On a terminal there is a line with bytes and speed, elsewhere a line per step."""
    if not sys.stderr.isatty():
        yield lambda message: None if message.startswith("Layer ") else say(message)
        return
    from rich.console import Console
    from rich.progress import (
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    from transformer2.conversion.checkpoints import watching_bytes

    columns = SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(message: str) -> None:
            if not message.startswith("Layer "):
                bar.console.print(message, markup=False, highlight=False)
            bar.update(task, description=message.replace("[", "("), completed=0)

        with watching_bytes(lambda count: bar.advance(task, count)):
            yield tell


def print_json(value: Any) -> None:
    """What `--json` prints."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_checks(result: dict[str, Any]) -> None:
    """The checks of a verification as a table on stderr."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "level",
        "check",
        "result",
        title=f"Verification {result['level']}, {result['seconds']} s",
        title_justify="left",
    )
    for check in result["checks"]:
        mark = "[green]pass[/green]" if check["passed"] else "[red]FAIL[/red]"
        detail = "" if check["detail"] == "ok" else check["detail"].replace("[", chr(92) + "[")
        level = f"{check['level']} {LEVEL_NAMES[check['level']]}"
        table.add_row(level, check["name"].replace("_", " "), f"{mark} {detail}".rstrip())
    Console(stderr=True).print(table)
