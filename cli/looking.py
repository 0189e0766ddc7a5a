"""Commands that show what there is: inspect and variants."""

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from .conversion import AsJson, print_json


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    app.command()(inspect)
    app.command()(variants)


def inspect(
    path: Annotated[str, typer.Argument(help="A Transformer2 folder: converted, trained or made from scratch.")],
    text: Annotated[
        str | None, typer.Option(help="Run the model on this text, and show what its residuals weight and write.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw that to an image file (.png, .pdf, .svg).")] = None,
    max_tokens: Annotated[int, typer.Option(help="How many tokens of the text.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Show variants, options, their parameters and the provenance of a Transformer2 checkpoint."""
    from transformer2 import conversion

    if plot is not None and text is None:
        raise typer.BadParameter("needs --text FILE, a text to run the model on.", param_hint="--plot")
    report = conversion.inspect_checkpoint(path)
    if text is not None:
        from transformer2.training.depth_plot import plot_depth
        from transformer2.training.depth_report import depth_report

        report["depth"] = depth_report(path, text, max_tokens)
        if plot is not None:
            plot_depth(report["depth"], plot)
    if as_json:
        print_json(report)
        return
    for axis in ("residual", "local_mixer"):
        options = dict(report[axis])
        kind = options.pop("type")
        print(f"{axis}: {kind}" + "".join(f"\n    {name} = {json.dumps(value)}" for name, value in options.items()))
    if "new_parameters" in report:
        print(f"parameters: {report['parameters']:,}, of which new: {report['new_parameters']:,}")
    else:
        own = f"{report['variant_parameters']:,} in residuals and local mixers"
        print(f"parameters: {report['parameters']:,}, of which {own}; not made by a conversion")
    for kind in report["kinds"]:
        print(f"    {kind['tensors']:4} x {kind['name']} {kind['shape']} {kind['dtype']}")
    for name, values in report.get("scalars", {}).items():
        print(f"{name}: min {values['min']:.4g}, mean {values['mean']:.4g}, max {values['max']:.4g}")
    if provenance := report.get("provenance"):
        origin = provenance["source"]
        commit = f" at {origin['commit']}" if origin["commit"] else ""
        print(f"made from {origin['name']}{commit} by transformer2 {provenance['tool_version']}")
    if result := report.get("verification"):
        print(f"verification: {result['level']} {'passed' if result['passed'] else 'FAILED'}")
    if "depth" in report:
        _show_depth(report["depth"])
    if plot is not None:
        print(f"Drawn to {plot}.")


def variants(
    model: Annotated[
        str | None, typer.Option(help="What each would add to this model: a folder, or the size of a preset.")
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List the presets instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the residual connections and local mixers with their options."""
    if presets:
        _show_presets(as_json)
        return
    menu = read_menu()
    if model is not None:
        from transformer2.conversion.costs import costs_of

        for (axis, kind), figures in costs_of(model).items():
            menu[axis][kind]["cost"] = figures
    if as_json:
        print_json(menu)
        return
    print("The defaults of `form` are those of a new model; `convert` takes form=identity unless told otherwise.\n")
    if model is not None:
        _show_costs(model, menu)
        return
    for axis, kinds in menu.items():
        print(f"--{axis.replace('_', '-')}")
        for kind, entry in kinds.items():
            print(f"  {kind}: {entry['about']}")
            if not entry["bitwise"]:
                print("      Starts as the pretrained model up to rounding, not bit for bit.")
            for name, option in entry["options"].items():
                print(f"      --set {axis}.{name}={json.dumps(option['default'])}    ({option['type']})")
                if option["about"]:
                    print(textwrap.indent(textwrap.fill(option["about"], 100), " " * 12))


def read_menu() -> dict[str, dict[str, dict[str, Any]]]:
    """Every variant of both axes: a sentence, its source, whether its identity form is bitwise, its options."""
    import inspect as introspection

    from transformer2.variants import AXES, describe, options_of

    menu: dict[str, dict[str, dict[str, Any]]] = {}
    for axis, kinds in AXES.items():
        menu[axis] = {}
        for kind, variant in kinds.items():
            about, meanings = read_docstring(introspection.getdoc(variant) or "")
            source = re.search(r"\((arXiv [\d.]+|OpenReview \w+|[A-Z][\w ]+ et al\., \d{4})", about)
            options = {
                name: {"type": describe(option.annotation), "default": option.default, "about": meanings.get(name, "")}
                for name, option in options_of(axis, kind).items()
            }
            entry = {"about": about, "source": source[1] if source else None, "bitwise": variant.bitwise}
            menu[axis][kind] = {**entry, "options": options}
    return menu


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first line of a variant's docstring, and its "name, name: meaning" entries by option."""
    first, _, rest = text.partition("\n")
    meanings = {"layers": "the layers that get one; null for all"}
    for entry in re.split(r"\n(?=\S)", rest):
        names, colon, meaning = entry.partition(":")
        if colon and re.fullmatch(r"\w+(, \w+)*", names.strip()):
            meanings.update(dict.fromkeys(names.strip().split(", "), " ".join(meaning.split())))
    return first, meanings


def _show_costs(model: str, menu: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"What each variant adds to {model}", title_justify="left", box=box.SIMPLE)
    for name, justify in {"axis": "left", "variant": "left", "source": "left", "parameters": "right"}.items():
        table.add_column(name, justify=justify, no_wrap=True)
    for name in ("FLOPs per token", "of the model's"):
        table.add_column(name, justify="right")
    table.add_column("starts as the model")
    for axis, kinds in menu.items():
        for kind, entry in kinds.items():
            cost = entry["cost"]
            if "not_applicable" in cost:
                table.add_row(axis, kind, entry["source"] or "", "-", "-", "-", cost["not_applicable"])
                continue
            cells = [f"{cost['extra_parameters']:,}", f"{cost['extra_flops_per_token']:,}"]
            share = f"{cost['extra_flops_share']:.2%}"
            exact = "bit for bit" if entry["bitwise"] else "up to rounding"
            table.add_row(axis, kind, entry["source"] or "", *cells, share, exact)
    Console(width=140).print(table)
    print("Recommended options (`--presets`), identity form; FLOPs counted over 128 tokens, without the head.")


def _show_presets(as_json: bool) -> None:
    from transformer2.configs import PARTS, names

    menu = {part: names(part) for part in PARTS}
    if as_json:
        print_json(menu)
        return
    print("A preset is called RESIDUAL[+LOCAL_MIXER]-SIZE, such as ddl+short_swa-135m.\n")
    for part, entries in menu.items():
        print(part)
        for name, about in entries.items():
            print(f"  {name}: {about}")


def _show_depth(report: dict[str, Any]) -> None:
    """One line per read or sublayer."""
    print(f"\ndepth, over {report['tokens']} tokens")
    for row in report.get("rewrites", []):
        print(
            f"  layer {row['layer']} {row['site']}: gate {row['gate_mean']:.3f}, wrote {row['written']:.3f} and "
            f"erased {row['erased']:.3f} times its output, share of erasing {row['erase_share']:.1%}"
        )
    for read in report.get("reads", []):
        place = "end" if read["layer"] is None else f"layer {read['layer']} {read['site']}"
        for index, group in enumerate(read["weights"]):
            name = f" [{index}]" if len(read["weights"]) > 1 else ""
            print(f"  {place}{name}: " + " ".join(f"{weight:.3f}" for weight in group))
