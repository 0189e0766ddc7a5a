"""The curves of a comparison in one picture."""

from pathlib import Path
from typing import Any

SMOOTHING = 0.9  # of the training loss, which is noisy; exponential, without bias at the start


def plot_curves(report: dict[str, Any], path: Path) -> None:
    """Draw training loss (left) and held-out loss (right) of every arm; seeds of an arm share a colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (name, runs) in enumerate(report["curves"].items()):
        for index, run in enumerate(runs):
            style = {"color": f"C{number}", "label": name if index == 0 else None, "linewidth": 1.3}
            steps = [step["step"] for step in run["steps"]]
            left.plot(steps, smoothed([step["loss"] for step in run["steps"]]), **style)
            evaluations = run["evaluations"]
            right.plot([e["step"] for e in evaluations], [e["nll"] for e in evaluations], marker="o", ms=3, **style)
    for axis, title in ((left, "training loss (smoothed)"), (right, "held-out loss")):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel("nats per token")
        axis.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, dpi=130)


def smoothed(values: list[float]) -> list[float]:
    """The exponential moving average, divided by the weight that it has so far."""
    average, result = 0.0, []
    for count, value in enumerate(values, 1):
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        result.append(average / (1 - SMOOTHING**count))
    return result
