"""The `transformer2` command. Importing this must stay cheap: whatever needs torch is imported inside the commands."""

import contextlib
import functools
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Annotated

import typer

from . import (
    conversion,
    data,
    evaluating,
    generation,
    looking,
    planning,
    preparing,
    training,
)

app = typer.Typer(
    name="transformer2",
    help="Retrofit, verify, fine-tune and use Llama-like models with pluggable residuals and local mixers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for room in (
    planning,
    conversion,
    looking,
    data,
    preparing,
    evaluating,
    training,
    generation,
):
    room.add_commands(app)
PREEMPTED = 143  # told to stop by SIGTERM, and ready to go on: no error
INTERRUPTED = "Interrupted; no file was left half-written."


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"transformer2 {metadata.version('transformer2')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of the command itself."""


def interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says one sentence on Ctrl-C; typer would end without a word."""

    @functools.wraps(command)
    def wrapped(*arguments, **keywords) -> None:
        try:
            command(*arguments, **keywords)
        except KeyboardInterrupt:
            print(f"\n{INTERRUPTED}", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


for registered in app.registered_commands:
    registered.callback = interruptible(registered.callback)


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """An error that the user can mend becomes one sentence and an exit code; TRANSFORMER2_TRACEBACK=1 shows where."""
    try:
        yield
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, BrokenPipeError):
            from transformer2.conversion.paths import sentence

            error = sentence(error.errno, error.filename)
        exit_code = getattr(error, "exit_code", None)
        if exit_code is None or os.environ.get("TRANSFORMER2_TRACEBACK"):
            raise
        print(error if exit_code == PREEMPTED else f"Error: {error}", file=sys.stderr)
        raise SystemExit(exit_code) from None


def open_streams() -> None:
    """Closed streams read and write nothing; characters that standard output cannot show are escaped."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):  # a test or a notebook may have put something else there
            stream.reconfigure(errors=errors)


def keep_logs_short() -> None:
    """No progress bars of the libraries where standard error is no terminal: they would fill a log file."""
    if sys.stderr.isatty():
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:  # it has looked at the variable already
        from transformers.utils import logging

        logging.disable_progress_bar()


def _end_as_if_interrupted(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _end_as_if_interrupted)  # what job schedulers send
    open_streams()
    keep_logs_short()
    with reporting_errors():
        app()
