"""The verdict as one PNG for a chat."""

from __future__ import annotations

import math
from pathlib import Path

COLUMNS = 3
BASELINE, CANDIDATES = "#2f6690", ("#e4572e", "#9b4dca", "#c9860a")
STATUS = {"aligned": "#147a4b", "not aligned": "#b3261e", "not judged": "#66738a"}


def png(report: dict, file: Path) -> None:
    """Draw the panels of a report (see report.data) into a PNG file, 1500 pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = report["panels"]
    rows = max(1, math.ceil(len(panels) / COLUMNS))
    figure = Figure(figsize=(15, 1.1 + 3.1 * rows), dpi=100, facecolor="white", layout="constrained")
    status = "aligned" if report["aligned"] else "not aligned"
    names = f"{', '.join(report['candidate'])}  against  {', '.join(report['baseline']) or 'no baseline'}"
    figure.suptitle(_plain(f"{names}\n{report['headline']}"), color=STATUS[status], fontsize=13, fontweight="bold")
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        _panel(axis, panel, report)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    FigureCanvasAgg(figure).print_png(str(file))


def _panel(axis, panel: dict, report: dict) -> None:
    x = panel["x"]
    if panel["band"]:
        axis.fill_between(x, *panel["band"], color=BASELINE, alpha=0.15, linewidth=0)
    for curves, colours in ((panel["baseline"], (BASELINE,)), (panel["candidate"], CANDIDATES)):
        for number, values in enumerate(curves):
            colour = colours[number % len(colours)]
            values = [math.nan if value is None else value for value in values]
            axis.plot(x, values, color=colour, alpha=0.2, linewidth=0.8)
            axis.plot(x, _smooth(values, report["window"]), color=colour, linewidth=1.7)
    for step in (*report["attempts"], panel["first"]):
        at = next((i for i, s in enumerate(panel["steps"]) if step is not None and s >= step), None)
        if at is not None:
            failing = step == panel["first"]
            axis.axvline(
                x[at], color=STATUS["not aligned"] if failing else "#8793a5", linestyle="--" if failing else ":"
            )
    axis.set_title(
        _plain(f"{panel['title']}: {panel['status']}"), color=STATUS[panel["status"]], fontsize=11, loc="left"
    )
    axis.grid(color="#e2e6ec", linewidth=0.8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8, colors="#5d6b7e")


def _smooth(values: list[float], window: int) -> list[float]:
    smooth = []
    for end in range(1, len(values) + 1):
        part = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        smooth.append(sum(part) / len(part) if part else math.nan)
    return smooth


def _plain(text: str) -> str:
    """A dollar sign would start mathematics."""
    return text.replace("$", r"\$")
