"""`transformer2 doctor`, before a run, and `transformer2 merge`, after one with adapters."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

GIB = 2**30


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("doctor")(doctor)
    app.command("merge")(merge)


def doctor(
    config: Annotated[Path, typer.Argument(help="YAML file with the settings of the run.", metavar="CONFIG.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change.", metavar="a.b=c")] = None,
    names: Annotated[bool, typer.Option("--names", help="List the parameters of every group.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a training run would do, what it needs, and what stands in its way. Nothing is trained or written."""
    from transformer2.training import doctor as run
    from transformer2.training.settings import load_settings

    report = run(load_settings(config, overrides or []))
    print(json.dumps(report, indent=2) if as_json else _diagnosis(report, names))
    if report["problems"]:
        raise SystemExit(1)


def merge(
    adapter: Annotated[str, typer.Argument(help="Folder with adapters, or the output of a run that trained them.")],
    output: Annotated[str, typer.Argument(help="The folder to make.")],
    base: Annotated[str | None, typer.Option(help="The model they were trained on; default: as they say.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Merge adapters into the weights of their model, and compare the logits before and after."""
    from transformer2.training import merge as run

    report = run(adapter, output, base=base, overwrite=overwrite)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(
        f"Wrote {output}: {report['base']} with {report['adapted']} matrices adapted and {report['replaced']} "
        f"parameters replaced; logits differ by {report['largest_difference']:.2g}, the largest is "
        f"{report['largest_logit']:.3g}."
    )


def _diagnosis(report: dict[str, Any], names: bool) -> str:
    lines = []
    for arm in report["arms"]:
        lines.append(f"{arm['name']} ({arm['about']})")
        for stage in arm["stages"]:
            lines.append(f"  {stage['name']}: {stage['steps']} steps, trains {stage['train']}")
            lines.append(f"    {'parameters':<24}{'number':>16}{'learning rate':>16}{'weight decay':>15}")
            for group in stage["groups"]:
                lines.append(
                    f"    {group['name']:<24}{group['count']:>16,}{group['lr']:>16g}{group['weight_decay']:>15g}"
                )
                if names:
                    lines += [f"        {name} ({count})" for name, count in group["parameters"].items()]
            lines.append(f"    {'frozen':<24}{stage['frozen']:>16,}")
            used = ", ".join(f"{what} {size / GIB:.2f}" for what, size in stage["memory"].items() if what != "total")
            lines.append(f"    memory: about {stage['memory']['total'] / GIB:.2f} GiB ({used})")
    lines.append(f"computes in {report['precision']}; {report['memory_available'] / GIB:.1f} GiB are free")
    if report["data"]:
        train = report["data"]["train"]
        epochs = "" if train.get("stream") else f", {train['epochs']:.2f} epochs"
        lines.append(f"{train['documents']:,} documents, {train['tokens']:,} tokens, {train['rows']:,} rows{epochs}")
    lines.append(f"packed documents: {report['isolation']}")
    marked = sys.stdout.isatty()
    for kind, colour in (("warnings", 33), ("problems", 31)):
        word = kind.removesuffix("s").capitalize()
        lines += [f"\033[{colour}m{word}:\033[0m {text}" if marked else f"{word}: {text}" for text in report[kind]]
    if not report["problems"]:
        lines.append("Nothing stands in the way.")
    return "\n".join(lines)
