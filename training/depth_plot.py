"""Pictures of a depth report: layers x sources, or for DDL the gates and what is erased."""

from pathlib import Path
from typing import Any

from transformer2.conversion.paths import plain_os_errors, user_path
from transformer2.errors import UserError

INPUTS = {3: ("queries", "keys", "values"), 4: ("queries", "keys", "values", "residual")}


def plot_depth(report: dict[str, Any], path: str | Path) -> None:
    """Draw a `depth_report` to an image: layers x sources, or for DDL gates and the share of erasing per sublayer.

    Raises UserError for a file type that cannot be drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    path = user_path(path)
    figure = Figure(figsize=(11, 6), layout="constrained")
    if path.suffix.removeprefix(".").lower() not in figure.canvas.get_supported_filetypes():
        raise UserError(f"A plot cannot be written as {path.name!r}: give it a name that ends in .png, .pdf or .svg.")
    with plain_os_errors(path):
        (_draw_rewrites if "rewrites" in report else _draw_reads)(figure, report)
        figure.savefig(path, dpi=150)


def _label(row: dict[str, Any]) -> str:
    return "end" if row["layer"] is None else f"{row['layer']} {row['site']}"


def _draw_reads(figure, report: dict[str, Any]) -> None:
    reads = report["reads"]
    groups = max(len(read["weights"]) for read in reads)
    columns = max(len(read["weights"][0]) for read in reads)
    names = INPUTS.get(groups) if report["residual"] in ("mudd", "dca") else None
    panels = groups if names else 1
    values = [
        [
            _pad(read["weights"][min(panel, len(read["weights"]) - 1)] if names else _mean(read["weights"]), columns)
            for read in reads
        ]
        for panel in range(panels)
    ]
    shown = [value for panel in values for row in panel for value in row if value == value]
    low, high = min(0.0, *shown), max(shown)
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for panel, (axis, table) in enumerate(zip(axes, values, strict=True)):
        bound = max(abs(low), abs(high))
        scale = {"cmap": "viridis", "vmin": 0, "vmax": high}
        if low < 0:
            scale = {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound}
        image = axis.imshow(table, aspect="auto", interpolation="nearest", **scale)
        axis.set_xlabel("stream" if report["residual"] in ("hyper_connections", "mhc") else "source, oldest first")
        axis.set_title(names[panel] if names else "")
    axes[0].set_yticks(range(len(reads)), [_label(read) for read in reads], fontsize=7 if len(reads) < 40 else 4)
    axes[0].set_ylabel("read, from the first layer down")
    figure.colorbar(image, ax=list(axes), label="mean weight")
    figure.suptitle(f"{report['residual']}: depth weights, mean over {report['tokens']} tokens")


def _draw_rewrites(figure, report: dict[str, Any]) -> None:
    rows = report["rewrites"]
    left, right = figure.subplots(1, 2, sharey=True)
    gates = [row["gate_histogram"] for row in rows]
    image = left.imshow(gates, aspect="auto", interpolation="nearest", extent=(0, 2, len(rows) - 0.5, -0.5))
    left.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=7 if len(rows) < 40 else 4)
    left.set_xlabel("gate")
    left.set_ylabel("sublayer, from the first layer down")
    figure.colorbar(image, ax=left, label="share of tokens")
    right.barh(range(len(rows)), [row["erase_share"] for row in rows])
    right.set_xlim(0, 1)
    right.set_xlabel("share of erasing in what is written and erased")
    figure.suptitle(f"ddl: gates and erasing, {report['tokens']} tokens")


def _mean(groups: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*groups, strict=True)]


def _pad(values: list[float], length: int) -> list[float]:
    return [*values, *[float("nan")] * (length - len(values))]
