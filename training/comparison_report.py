"""A comparison in words: one sentence that says whether the variant helped, and a report for people."""

from typing import Any

from transformer2.training.arms import CONTROL
from transformer2.training.paired import COVERAGE, FEWEST_DOCUMENTS, DocumentScores, paired_difference, verdict

SAME_START = 1e-3  # relative difference of the perplexity before training that rounding can explain


def with_comparisons(
    report: dict[str, Any], scores: dict[str, list[DocumentScores]], reference: str | None
) -> dict[str, Any]:
    """The report with the paired differences between every arm and `reference`, the sentence, and remarks.

    Without a reference there are no differences, and the sentence names the best arm.
    """
    report = {**report, "reference": reference, "comparisons": {}, "remarks": _remarks(report["arms"], reference)}
    for name in report["arms"]:
        if reference is not None and name != reference:
            paired = paired_difference(scores[name], scores[reference])
            report["comparisons"][name] = {**paired, "verdict": verdict(paired)}
    report["sentences"] = {name: _sentence(name, report) for name in report["comparisons"]}
    if not report["sentences"]:
        best = min(report["arms"], key=lambda name: report["arms"][name]["nll"])
        report["sentence"] = (
            f"Of {len(report['arms'])} arms {best} predicts the held-out text best, with "
            f"{report['arms'][best]['nll']:.4f} nats per token; no control was trained to compare it with."
            if len(report["arms"]) > 1
            else f"{best} needs {report['arms'][best]['nll']:.4f} nats per held-out token; there is nothing to "
            "compare it with."
        )
    else:
        report["sentence"] = " ".join(text for text in report["sentences"].values() if text)
    return report


def _sentence(name: str, report: dict[str, Any]) -> str:
    """One sentence on one arm and the reference."""
    paired, arms, reference = report["comparisons"][name], report["arms"], report["reference"]
    words = {
        "helped": f"{name} helped",
        "hurt": f"{name} did worse than the {reference}",
        "undecided": f"Whether {name} helped cannot be told",
    }[paired["verdict"]]
    seeds = len(paired["per_seed"])
    figures = (
        f"it needs {arms[name]['nll']:.4f} nats per held-out token, the {reference} {arms[reference]['nll']:.4f}: a "
        f"difference of {paired['difference']:+.4f}"
    )
    if paired["interval"] is None:
        extent = f"and {paired['documents']} held-out document(s) are too few for an interval"
    else:
        low, high = paired["interval"]
        extent = f"{COVERAGE:.0%} interval {low:+.4f} to {high:+.4f} over {paired['documents']} documents"
    signs = {difference < 0 for difference in paired["per_seed"]}
    disagree = ", which disagree about the sign" if len(signs) > 1 else ""
    return f"{words}: {figures} ({extent}; {seeds} seed{'s' if seeds > 1 else ''}{disagree})."


def _remarks(arms: dict[str, Any], reference: str | None) -> list[str]:
    """What a reader has to know to judge the figures."""
    remarks = []
    if reference is not None:
        own, start = arms[reference], arms[reference]["perplexity_before"][0]
        for name, arm in arms.items():
            if abs(arm["perplexity_before"][0] / start - 1) > SAME_START:
                remarks.append(
                    f"Before training, {name} had perplexity {arm['perplexity_before'][0]:.3f} and the {reference} "
                    f"{start:.3f}: they did not start as the same function."
                )
            if arm["trained"] != own["trained"]:
                remarks.append(
                    f"{name} trained {arm['trained']:,} parameters, the {reference} {own['trained']:,}, of "
                    f"{arm['parameters']:,} and {own['parameters']:,}."
                )
    remarks += [f"{name}: {warning}" for name, arm in arms.items() for warning in arm["warnings"]]
    return remarks


def to_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    held_out, arms = report["held_out"], report["arms"]
    some = next(iter(arms.values()))
    seeds = ", ".join(map(str, report["seeds"]))
    lines = [
        "# Comparison",
        "",
        report["sentence"],
        "",
        f"Every arm: {some['tokens']:,} tokens, the same data, order and steps, seed(s) {seeds}, {some['precision']}. "
        f"Held out: {held_out['tokens']:,} tokens in {held_out['documents']} documents.",
        "",
        "| arm | parameters | trained | nats/token | perplexity | difference | interval | documents won | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, arm in sorted(arms.items(), key=lambda item: item[1]["nll"]):
        paired = report["comparisons"].get(name)
        difference = interval = share = ""
        if paired:
            difference, share = f"{paired['difference']:+.4f}", f"{paired['better_documents']:.0%}"
            interval = "{:+.4f} to {:+.4f}".format(*paired["interval"]) if paired["interval"] else "too few documents"
        lines.append(
            f"| {name} | {arm['parameters']:,} | {arm['trained']:,} | {arm['nll']:.4f} | {arm['perplexity']:.3f} | "
            f"{difference} | {interval} | {share} | {arm['tokens_per_second']:.0f} |"
        )
    if len(report["seeds"]) > 1:
        lines += ["", "Nats per token by seed:", ""]
        lines += [f"* {name}: {', '.join(f'{nll:.4f}' for nll in arm['nll_per_seed'])}" for name, arm in arms.items()]
    lines += ["", "![Curves](curves.png)", ""]
    if report["comparisons"]:
        lines += [
            f"Differences are against the {report['reference']}, in nats per token; below zero is better. The "
            f"interval is a paired bootstrap over documents ({COVERAGE:.0%}; from {FEWEST_DOCUMENTS} documents on). "
            "It covers the choice of the held-out documents, not that of the seed, the data or the learning rates: "
            "one run per arm is no evidence about the method.",
            "",
        ]
    if any(name == CONTROL for name in arms) and report["settings"]["optimisation"].get("train") == "new":
        lines += ["The control has no new parameters, so it trained its pretrained ones.", ""]
    lines += [f"* {remark}" for remark in report["remarks"]]
    return "\n".join(lines).rstrip() + "\n"
