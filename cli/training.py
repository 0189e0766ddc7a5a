"""Commands around training: train, eval, generate."""

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
