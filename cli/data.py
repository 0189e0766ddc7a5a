"""`transformer2 data preview|stats`: what a training run would see."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(help="YAML file with the settings of the run.", metavar="CONFIG.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to change.", metavar="a.b=c")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at the data of a training run.")
    data.command("preview")(preview)
    data.command("stats")(stats)
    app.add_typer(data, name="data")


def preview(
    config: Config,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Show the first rows of a run; what is learned stands out, [[so]] where there are no colours."""
    from transformer2.training.data_report import data_preview
    from transformer2.training.settings import load_settings

    shown = data_preview(load_settings(config, overrides or []), rows)
    if as_json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    opening, closing = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    for number, row in enumerate(shown, 1):
        print(f"--- row {number}")
        for index, part in enumerate(row):
            if part["starts"] and index:
                print("\n--- next document")
            print(f"{opening}{part['text']}{closing}" if part["learned"] else part["text"], end="")
        print()


def stats(config: Config, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Count documents, tokens, targets and rows, and what is cut or left out."""
    from transformer2.training.data_report import data_stats
    from transformer2.training.settings import load_settings

    report = data_stats(load_settings(config, overrides or []))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for part, figures in report.items():
        if figures is None:
            continue
        print(part.replace("_", " ") + (" (first block of the stream)" if figures.get("stream") else ""))
        for name, value in figures.items():
            if name != "stream":
                print(
                    f"    {name.replace('_', ' '):<16}{value:>14,.2f}"
                    if isinstance(value, float)
                    else f"    {name.replace('_', ' '):<16}{value:>14,}"
                )
