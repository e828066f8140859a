"""The prediction as a stacked-bar picture: one HTML file without scripts or outside references."""

from __future__ import annotations

from html import escape

from atlasrl.memory.job import GIB
from atlasrl.memory.model import Phase, Prediction
from atlasrl.memory.report import verdict
from atlasrl.memory.terms import PHASES, TERMS

# Okabe-Ito and their lighter shades: told apart by people who do not see all colours.
COLOURS = (
    "#0072B2",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#E69F00",
    "#D55E00",
    "#CC79A7",
    "#999999",
    "#004166",
    "#8DD3C7",
    "#7F3300",
    "#B8A400",
    "#5D3A5B",
    "#BBBBBB",
    "#333333",
)
BAR, GAP, LEFT, WIDTH = 18, 6, 150, 640


def page(name: str, p: Prediction) -> str:
    """One chart per phase, a bar per stage; the line is the memory of the device."""
    terms = [term for term in TERMS if any(term in phase for stage in p.stages for phase in stage.phases.values())]
    colours = {term: COLOURS[i % len(COLOURS)] for i, term in enumerate(terms)}
    scale = WIDTH / (max(p.job.device, p.tightest[2]) * 1.05)
    charts = []
    for phase in p.stages[0].phases:
        bars = [(f"stage {stage.rank}", stage.phases[phase]) for stage in p.stages]
        charts.append(
            f"<h2>{escape(phase)}</h2><p>{escape(PHASES[phase])}</p>{chart(bars, colours, scale, p.job.device)}"
        )
    legend = "".join(
        f'<li><span style="background:{colours[term]}"></span>{escape(term)}: {escape(TERMS[term].why)}</li>'
        for term in terms
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Memory of {escape(name)}</title>'
        "<style>body{font:14px sans-serif;max-width:60em;margin:2em auto}"
        "li{list-style:none}li span{display:inline-block;width:1em;height:1em;margin-right:.5em}</style>"
        f"<h1>{escape(name)}</h1><p>{escape(str(p.split))}: {escape(verdict(p))}</p>"
        f"<ul>{legend}</ul>{''.join(charts)}</html>"
    )


def chart(bars: list[tuple[str, Phase]], colours: dict[str, str], scale: float, device: int) -> str:
    height = len(bars) * (BAR + GAP) + GAP
    shapes = []
    for row, (label, terms) in enumerate(bars):
        y, x = GAP + row * (BAR + GAP), float(LEFT)
        shapes.append(f'<text x="0" y="{y + BAR - 4}">{escape(label)} {sum(terms.values()) / GIB:.1f} GiB</text>')
        for term, size in terms.items():
            tip = f"<title>{escape(term)} {size / GIB:.2f} GiB</title>"
            width = size * scale
            shapes.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colours[term]}">{tip}</rect>'
            )
            x += width
    limit = LEFT + device * scale
    shapes.append(f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="{height}" stroke="red" stroke-width="2"/>')
    return f'<svg width="{LEFT + WIDTH}" height="{height}" role="img">{"".join(shapes)}</svg>'
