"""From a command line to trials: contradictions are refused before anything starts."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from atlasrl.cli.selftest import main


def refused(*words: str) -> str:
    answer = CliRunner().invoke(main, list(words))
    assert answer.exit_code == 2, answer.output
    return answer.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "3", "--workers", "4"], "3 does not divide --workers 4"),
        (["--tp", "2", "--dp", "2", "--workers", "2"], "= 4, but --workers says 2"),
        (["--ep", "4", "--workers", "2"], "--ep 4 × --etp 1 does not divide --tp 1 × --dp 2"),
        (["--backend", "fsdp2", "--tp", "2"], "fsdp2 has no --tp"),
        (["--without-fix", "mla-rotary-kex"], "did you mean mla-rotary-key?"),
        (["--without-fix", "everything"], "known: ddp-optimizer-flag"),
        (["--scale-gradient", "1"], "is not RANK=FACTOR"),
        (["--scale-gradient", "2=1.01", "--workers", "2"], "ranks are 0 to 1"),
        (["--model", "/nonexistent"], "does not exist"),
    ],
)
def test_a_request_that_contradicts_itself_is_usage(words, says):
    assert says in refused(*words)


def trials(*words: str):
    from atlasrl.selftest.cases import trials_of

    options = main.make_context("selftest", list(words)).params
    for name in ("debug", "rows", "as_json", "model", "batch", "record"):
        options.pop(name)
    return trials_of(**options)


def test_experts_without_a_number_of_workers_get_the_fewest_that_hold_them():
    (trial,) = trials("--ep", "2")
    assert (trial.layout.workers, trial.layout.data) == (2, 2)
    (trial,) = trials("--tp", "2", "--ep", "2")
    assert (trial.layout.workers, trial.layout.data) == (2, 1)


def test_proven_means_every_layout_that_fits_and_neighbours_share_processes():
    sizes = [trial.layout.workers for trial in trials("--proven", "--workers", "2")]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 2 and len(sizes) >= 6
    assert len(trials("--proven", "--workers", "4")) > len(sizes)


def test_two_trials_that_differ_never_have_the_same_name():
    changes = ["--plain-optimizer", "--dynamic-batch", "--clip-grad=2", "--recompute=full"]
    changes += ["--scale-gradient=0=1.01", "--without-fix=router-groups"]
    names = [trials("--workers", "2", change)[0].name for change in changes]
    assert len({*names, trials("--workers", "2")[0].name}) == len(changes) + 1
