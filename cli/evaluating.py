"""The command `eval`."""

import json
import sys
from typing import Annotated, Any

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the command of this file."""
    app.command("eval")(evaluate)


def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub name.", metavar="PATH")],
    text: Annotated[
        str | None, typer.Option(help="Text, JSONL or parquet file, data set folder or hub data set.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Instead of a text: tasks of lm-evaluation-harness, as a,b,c.")
    ] = None,
    task_folder: Annotated[str | None, typer.Option(help="Folder with tasks of your own, in YAML.")] = None,
    limit: Annotated[int | None, typer.Option(help="Examples per task.")] = None,
    against: Annotated[str | None, typer.Option(help="A second checkpoint to compare with.")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens per row; default: 1024 at most.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Score only the first so many tokens.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    text_column: Annotated[str, typer.Option(help="Column with the text, of tables and data sets.")] = "text",
    separator: Annotated[str | None, typer.Option(help="What stands between the documents of a text file.")] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Perplexity and bits per byte on a text, and the distance to another checkpoint; or scores on tasks."""
    from transformer2.errors import UserError

    if (text is None) == (tasks is None):
        raise UserError("Give either --text or --tasks.")
    if tasks is not None:
        from transformer2.training.harness import run_tasks

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        report = run_tasks(model, names, against=against, task_folder=task_folder, limit=limit, dtype=dtype)
        print(json.dumps(report, indent=2) if as_json else _task_summary(report))
        return
    if task_folder is not None or limit is not None:
        raise UserError("--task-folder and --limit are for --tasks; a text is cut with --max-tokens.")
    from tqdm import tqdm

    from transformer2.training.evaluation import evaluate as run

    with tqdm(unit="token", file=sys.stderr, delay=0.5, disable=not sys.stderr.isatty()) as bar:
        report = run(
            model,
            text,
            against=against,
            sequence_length=sequence_length,
            max_tokens=max_tokens,
            dtype=dtype,
            text_column=text_column,
            separator=separator,
            split=split,
            on_start=bar.reset,
            on_batch=bar.update,
        )
    print(json.dumps(report, indent=2) if as_json else _evaluation_summary(report))


def _evaluation_summary(report: dict[str, Any]) -> str:
    def line(name: str, scores: dict[str, Any]) -> str:
        return (
            f"{name:<8}{scores['perplexity']:>12.4f} perplexity {scores['nll']:>10.5f} nats/token "
            f"{scores['bits_per_byte']:>9.5f} bits/byte"
        )

    lines = [
        f"{report['tokens']:,} tokens ({report['bytes']:,} bytes) in rows of {report['sequence_length']}, "
        f"{report['dtype']}, {report['tokens_per_second']:.0f} tokens/s",
        line("model", report),
    ]
    if "base" in report:
        lines.append(line("base", report["base"]))
        lines.append(
            f"KL(base || model) {report['kl']:.6f} nats/token, same first choice {report['top1_agreement']:.2%}"
        )
    return "\n".join(lines)


def _task_summary(report: dict[str, Any]) -> str:
    header = f"{'task':<24}{'metric':<20}{'model':>10}{'base':>10}"
    lines = [header]
    for task, scores in report["tasks"].items():
        for metric, value in scores.items():
            base = report["base"][task][metric] if report["base"] else None
            lines.append(f"{task:<24}{metric:<20}{value:>10.4f}" + (f"{base:>10.4f}" if base is not None else ""))
    if not report["base"]:
        lines.append("Without the base beside it, a score says little about a retrofit: give --against BASE.")
    return "\n".join(lines)
