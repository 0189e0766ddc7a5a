"""The `transformer2` command. Importing this must stay cheap: whatever needs torch is imported inside the commands."""

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from . import conversion, training

app = typer.Typer(
    name="transformer2",
    help="Retrofit, verify, fine-tune and use Llama-like models with pluggable residuals and local mixers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
conversion.add_commands(app)
training.add_commands(app)


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """An error that the user can mend becomes one sentence and an exit code; TRANSFORMER2_TRACEBACK=1 shows where."""
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted; nothing was left half-written.", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None or os.environ.get("TRANSFORMER2_TRACEBACK"):
            raise
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(exit_code) from None


def main() -> None:
    """Run the command line."""
    with reporting_errors():
        app()
