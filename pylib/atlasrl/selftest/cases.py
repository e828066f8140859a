"""From the options of `bin/selftest` to trials."""

from __future__ import annotations

import difflib
from dataclasses import replace

from atlasrl.errors import UsageFault
from atlasrl.selftest.trial import Trial, known_fixes
from atlasrl.trainer.layout import PROVEN, Layout


def trials_of(
    *,
    backend: str,
    workers: int | None,
    dp: int | None,
    tp: int,
    pp: int,
    ep: int,
    etp: int,
    proven: bool,
    plain_optimizer: bool,
    recompute: str,
    dynamic_batch: bool,
    clip_grad: float,
    scale_gradient: tuple[str, ...],
    without_fix: tuple[str, ...],
) -> list[Trial]:
    """The trials that a command line asks for, grouped so that neighbours share worker processes.

    Raises:
        UsageFault: sizes that contradict each other, an unknown fix, or a factor that is no RANK=FACTOR.
    """
    layouts = [_layout(backend, workers, dp, tp, pp, ep, etp)]
    if proven:
        layouts = [known for known in PROVEN if known.workers <= (workers or 4)]
        if backend == "fsdp2":
            layouts = [Layout(data=count) for count in (1, 2, 4) if count <= (workers or 4)]
    trial = Trial(
        backend=backend,
        distributed_optimizer=not plain_optimizer,
        recompute=recompute,
        dynamic_batch=dynamic_batch,
        clip_grad=clip_grad,
        gradient_scale=_factors(scale_gradient, max(layout.workers for layout in layouts)),
        without=_fixes(without_fix),
    )
    ordered = sorted(layouts, key=lambda layout: layout.workers)
    return [replace(trial, layout=layout) for layout in ordered]


def _layout(backend: str, workers: int | None, dp: int | None, tp: int, pp: int, ep: int, etp: int) -> Layout:
    if backend == "fsdp2" and (tp, pp, ep, etp) != (1, 1, 1, 1):
        raise UsageFault("--backend fsdp2 has no --tp, --pp, --ep or --etp; it shards over all --workers")
    if workers and workers % (tp * pp):
        raise UsageFault(f"--tp {tp} × --pp {pp} = {tp * pp} does not divide --workers {workers}")
    if dp is None:
        dp = workers // (tp * pp) if workers else _fewest_replicas(tp, pp, ep, etp)
    layout = Layout(tensor=tp, pipeline=pp, expert=ep, expert_tensor=etp, data=dp)
    if workers and layout.workers != workers:
        raise UsageFault(f"--dp {dp} × --tp {tp} × --pp {pp} = {layout.workers}, but --workers says {workers}")
    if (layout.tensor * layout.data) % (ep * etp):
        raise UsageFault(f"--ep {ep} × --etp {etp} does not divide --tp {tp} × --dp {dp}")
    return layout


def _fewest_replicas(tp: int, pp: int, ep: int, etp: int) -> int:
    return next(dp for dp in range(1, ep * etp + 1) if dp * tp % (ep * etp) == 0)


def _fixes(ids: tuple[str, ...]) -> tuple[str, ...]:
    known = known_fixes()
    for fix in ids:
        if fix not in known:
            near = difflib.get_close_matches(fix, known, 1)
            raise UsageFault(
                f"--without-fix {fix}: no such fix; "
                + (f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}")
            )
    return ids


def _factors(texts: tuple[str, ...], workers: int) -> dict[int, float]:
    factors = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise UsageFault(f"--scale-gradient {text!r} is not RANK=FACTOR, for example 1=1.01") from None
        if not 0 <= int(rank) < workers:
            raise UsageFault(f"--scale-gradient {text!r}: ranks are 0 to {workers - 1}")
    return factors
