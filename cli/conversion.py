"""Commands around conversion: convert, verify, inspect, variants."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
