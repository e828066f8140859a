"""The self-test on real workers of verl: right layouts pass, and every known fault of the stack is found.

One Ray serves all; trials that share a backend, workers and fixes share the worker processes.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from atlasrl.selftest.compare import table
from atlasrl.selftest.trial import Trial
from atlasrl.trainer.layout import PROVEN, Layout

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def bench():
    pytest.importorskip("megatron.core")
    from atlasrl.selftest.workbench import workbench

    with workbench(workers=2) as bench:
        yield bench


def test_fsdp2_is_exact_on_two_workers(bench):
    verdict = bench.run(Trial("fsdp2", Layout(data=2)))
    assert verdict.ok, table(verdict)


def test_fsdp2_with_one_gradient_a_hundredth_too_large_fails(bench):
    verdict = bench.run(Trial("fsdp2", Layout(data=2), gradient_scale={1: 1.01}))
    assert not verdict.ok and len(verdict.wrong) > 200
    assert max(row.relative for row in verdict.wrong if row.kind == "gradient" and row.step == 1) < 0.05


@pytest.mark.parametrize("layout", [known for known in PROVEN if known.workers == 2], ids=lambda layout: layout.name)
def test_megatron_is_exact_on_two_workers(bench, layout):
    verdict = bench.run(Trial(layout=layout))
    assert verdict.ok, table(verdict)


@pytest.mark.parametrize(
    "trial",
    [
        Trial(layout=Layout(data=2, expert=2), distributed_optimizer=False),
        Trial(layout=Layout(tensor=2, expert=2), recompute="full"),
        Trial(layout=Layout(data=2, expert=2), dynamic_batch=True),
        Trial(layout=Layout(data=2, expert=2), clip_grad=0.05),
    ],
    ids=lambda trial: trial.name,
)
def test_megatron_options_change_nothing_in_the_mathematics(bench, trial):
    verdict = bench.run(trial)
    assert verdict.ok, table(verdict)


@pytest.mark.parametrize("layout", [Layout(data=2, expert=2), Layout(tensor=2, expert=2)], ids=lambda x: x.name)
def test_megatron_with_one_gradient_a_hundredth_too_large_fails(bench, layout):
    verdict = bench.run(Trial(layout=layout, gradient_scale={1: 1.01}))
    assert not verdict.ok and len(verdict.wrong) > 200


def test_router_biases_that_move_by_themselves_are_found(bench):
    """mbridge moves them by 0.001 a step; nothing else is wrong after the first one."""
    verdict = bench.run(Trial(layout=Layout(data=2, expert=2), without=("router-bias",)))
    first = [row for row in verdict.wrong if row.step == 1]
    assert first and all(row.name.endswith("e_score_correction_bias") for row in first)
    assert all(row.largest == pytest.approx(0.001, rel=1e-3) for row in first)


FAULTS = ("ddp-optimizer-flag", "mla-rotary-key")
"""Two faults that do not meet in one layout: the first needs the plain optimizer, the second tensor parallelism."""


def test_half_reduced_gradients_are_found(bench):
    """verl PR #5775: outside its own shard a worker steps on its own gradient divided by the number of workers."""
    verdict = bench.run(Trial(layout=Layout(data=2), distributed_optimizer=False, without=FAULTS))
    assert not verdict.ok
    assert {row.rank for row in verdict.wrong} == {0, 1}
    assert all(
        norm < 0.95 * expected for norm, expected in zip(verdict.grad_norms, verdict.reference_norms, strict=True)
    )


def test_the_lost_gradient_of_the_rotary_key_is_found(bench):
    """Megatron-LM #1699: the last layer's gradients are right except where the shared key enters."""
    verdict = bench.run(Trial(layout=Layout(tensor=2, expert=2), without=FAULTS))
    wrong = [row for row in verdict.wrong if row.step == 1 and row.kind == "gradient"]
    last_layer = {row.name.split("layers.3.")[1] for row in wrong if "layers.3." in row.name}
    assert last_layer == {"self_attn.kv_a_proj_with_mqa.weight", "input_layernorm.weight"}
    assert not any("lm_head" in row.name or "model.norm" in row.name for row in wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("fix", ["router-groups"])
def test_a_policy_that_routes_differently_is_found(bench, fix):
    verdict = bench.run(Trial(layout=Layout(data=2, expert=2), without=(fix,)))
    assert not verdict.ok and len(verdict.wrong) > 100


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words", [["--backend", "fsdp2"], [], ["--plain-optimizer"]], ids=lambda words: " ".join(words)
)
def test_every_layout_that_is_called_proven_passes_on_four_workers(words):
    from atlasrl.cli.selftest import main

    answer = CliRunner().invoke(main, ["--proven", "--workers", "4", "--json", *words])
    report = json.loads(answer.stdout)
    assert {trial["name"]: trial["ok"] for trial in report["trials"] if not trial["ok"]} == {}
    assert answer.exit_code == 0
