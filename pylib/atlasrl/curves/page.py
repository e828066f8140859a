"""The verdict as one HTML file that needs no network: curves, verdicts and formulas."""

from __future__ import annotations

import json
from pathlib import Path

PARTS = Path(__file__).with_name("page")


def html(report: dict) -> str:
    """The page of a report (see report.data).

    Names and tags come from foreign files: they travel as JSON in which no `<` is left, and the script puts them on the
    page as text, never as markup. The content security policy forbids the page every request.
    """
    embedded = json.dumps(report, allow_nan=False).replace("<", "\\u003c")
    page = (PARTS / "page.html").read_text()
    for name, part in (
        ("/*style*/", (PARTS / "page.css").read_text()),
        ("/*script*/", (PARTS / "page.js").read_text()),
        ("/*report*/", embedded),
    ):
        page = page.replace(name, part)
    return page
