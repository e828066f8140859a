"""Recorded tensors against the reference: how far off is each one, and is the layout right?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

GRADIENT_TOLERANCE = (1e-4, 1e-3)
"""Largest |difference| / |reference| of a gradient, as 2-norms, in the first optimizer step and later. float32 sums in
another order give 1e-6 to 1e-5 in the first step."""
UPDATE_TOLERANCE = 2e-2
"""Largest |difference| / |change| of a parameter. Adam divides by the gradient's size, so elements with gradients near
zero turn rounding into a visible part of their step, and of all later gradients."""
NORM_TOLERANCE = (1e-5, 1e-4)
NEGLIGIBLE = 1e-6
"""A tensor whose reference is below this share of the whole norm is compared on that scale."""


@dataclass(frozen=True)
class Row:
    """One tensor of one optimizer step on the worker where it is furthest off."""

    step: int
    kind: str
    name: str
    rank: int
    relative: float
    largest: float
    """Largest absolute difference of one element."""
    ok: bool


@dataclass(frozen=True)
class Verdict:
    name: str
    ok: bool
    grad_norms: list[float]
    """Per optimizer step, as reported by verl on rank 0."""
    reference_norms: list[float]
    compared: int
    """Tensors per kind, step and worker that were compared."""
    rows: list[Row] = field(repr=False)
    """Furthest off first; per tensor and step the worst worker."""
    problems: list[str] = field(default_factory=list)
    """What is wrong beside tensors: missing names, norms."""

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.ok]

    def as_dict(self, rows: int = 10) -> dict:
        return {**asdict(self), "wrong": len(self.wrong), "rows": [asdict(row) for row in self.rows[:rows]]}


def judge(name: str, records: list[dict], reference: list) -> Verdict:
    """Compare what every worker recorded with the reference's optimizer steps."""
    rows: dict[tuple, Row] = {}
    problems, compared = [], 0
    for number, expected in enumerate(reference):
        for record in records:
            recorded = record["steps"][number]
            where = f"rank {record['rank']}, optimizer step {number + 1}"
            allowed = NORM_TOLERANCE[min(number, 1)] * expected.grad_norm
            if not abs(recorded["grad_norm"] - expected.grad_norm) <= allowed:
                problems.append(
                    f"{where}: gradient norm {recorded['grad_norm']:.6f}, the reference says {expected.grad_norm:.6f}"
                )
            for kind, found, wanted, scale in (
                ("gradient", recorded["gradients"], expected.gradients, expected.gradients),
                ("parameter", recorded["parameters"], expected.parameters, expected.changes),
            ):
                if missing := sorted(set(wanted) - set(found)):
                    problems.append(f"{where}: {len(missing)} {kind}s are missing, first {missing[0]}")
                if unknown := sorted(set(found) - set(wanted)):
                    problems.append(f"{where}: {len(unknown)} {kind}s are unknown, first {unknown[0]}")
                for row in _rows(number + 1, kind, record["rank"], found, wanted, scale):
                    compared += 1
                    key = (row.step, row.kind, row.name)
                    if key not in rows or not row.relative <= rows[key].relative:  # not a number counts as worse
                        rows[key] = row
    ordered = sorted(rows.values(), key=_distance, reverse=True)
    return Verdict(
        name=name,
        ok=all(row.ok for row in ordered) and not problems,
        grad_norms=[step["grad_norm"] for step in records[0]["steps"]],
        reference_norms=[step.grad_norm for step in reference],
        compared=compared,
        rows=ordered,
        problems=problems,
    )


def _rows(step: int, kind: str, rank: int, found: dict, wanted: dict, scale: dict):
    import torch

    whole = torch.sqrt(sum((tensor.double() ** 2).sum() for tensor in scale.values())).item()
    for name in sorted(set(found) & set(wanted)):
        difference = found[name].double().reshape(wanted[name].shape) - wanted[name].double()
        size = max(scale[name].double().norm().item(), NEGLIGIBLE * whole)
        relative = difference.norm().item() / size
        yield Row(step, kind, name, rank, relative, difference.abs().max().item(), relative <= _tolerance(step, kind))


def _distance(row: Row) -> float:
    return float("inf") if row.relative != row.relative else row.relative / _tolerance(row.step, row.kind)


def _tolerance(step: int, kind: str) -> float:
    return GRADIENT_TOLERANCE[min(step, 2) - 1] if kind == "gradient" else UPDATE_TOLERANCE


def table(verdict: Verdict, rows: int = 10) -> str:
    """The tensors that are furthest off, as text of at most 100 columns."""
    lines = [f"{'step':>4} {'kind':9} {'rank':>4} {'relative':>9} {'largest':>9}  tensor"]
    for row in verdict.rows[:rows]:
        mark = "" if row.ok else "  WRONG"
        name = row.name if len(row.name) <= 52 else "…" + row.name[-51:]
        lines.append(f"{row.step:>4} {row.kind:9} {row.rank:>4} {row.relative:>9.1e} {row.largest:>9.1e}  {name}{mark}")
    return "\n".join(lines)
