"""Commands around training: init, train."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command("init")(init)
    app.command("train")(train)


def init(
    preset: Annotated[str, typer.Argument(help="RESIDUAL[+LOCAL_MIXER]-SIZE, see `transformer2 variants --presets`.")],
    output: Annotated[str, typer.Argument(help="The folder to make.")],
    tokenizer: Annotated[str, typer.Option(help="A model folder to take the tokenizer from.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make a model with random weights from a preset, to train it from scratch."""
    from transformer2.training.scratch import start_from_scratch

    report = start_from_scratch(preset, output, tokenizer, seed=seed, dtype=dtype, overwrite=overwrite)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print(f"{report['output']}: {report['preset']}, {report['parameters']:,} random parameters.")


def train(
    config: Annotated[Path, typer.Argument(help="YAML file with the settings.", metavar="CONFIG.yaml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, such as optimisation.lr.new=1e-3.", metavar="a.b=c")
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings, defaults filled in, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report of the run as JSON.")] = False,
) -> None:
    """Fine-tune a checkpoint on text; only its new parameters, or all."""
    from transformer2.errors import UserError
    from transformer2.training.settings import load_settings, to_yaml

    main_process = os.environ.get("RANK", "0") == "0"
    try:
        settings = load_settings(config, overrides or [])
        if print_config:
            print(to_yaml(settings), end="")
            return
        from transformer2.training.finetune import train as run

        report = run(settings)
    except UserError as error:
        if not main_process:  # every process fails alike: one of them says why,
            time.sleep(5)  # and has the time to, because launchers end all when one has ended
            raise SystemExit(error.exit_code) from None
        raise
    finally:
        _leave_process_group()
    if main_process and "sentence" in report:  # of a comparison
        wrote = f"Wrote {settings.output}/report.md; the models are in {settings.output}/ARM-seedN."
        print(json.dumps(report, indent=2) if as_json else f"{report['sentence']}\n{wrote}")
    elif main_process:
        for warning in report["warnings"]:
            print(f"Warning: {warning}", file=sys.stderr)
        print(json.dumps(report, indent=2) if as_json else _train_summary(report, settings.output))


def _leave_process_group() -> None:
    """So that torch does not complain at exit. Does nothing where nothing was imported."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _train_summary(report: dict[str, Any], output: str) -> str:
    steps, trained = report["steps"], sum(kind["trained"] for kind in report["parameters"].values())
    lines = [
        f"Trained {trained:,} parameters for {len(steps)} steps: "
        f"loss {steps[0]['loss']:.4f} -> {steps[-1]['loss']:.4f}, {report['tokens']:,} tokens at "
        f"{report['tokens_per_second']:.0f} tokens/s in {report['precision']}."
    ]
    if report["evaluations"]:
        before, after = report["perplexity_before"], report["perplexity_after"]
        lines.append(f"Held-out perplexity {before:.3f} -> {after:.3f}.")
    return "\n".join([*lines, f"Wrote {output}."])
