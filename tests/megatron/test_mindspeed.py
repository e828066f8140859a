"""The lost gradient of the rotary key with MindSpeed's own latent attention, and the same fix in force on it.

Needs a checkout of Ascend/MindSpeed (v2.2.0_core_r0.12.1 was used): MINDSPEED_CHECKOUT=/path pytest …
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atlasrl.selftest.compare import table
from atlasrl.selftest.trial import Trial
from atlasrl.trainer.layout import Layout

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif("MINDSPEED_CHECKOUT" not in os.environ, reason="MINDSPEED_CHECKOUT names no MindSpeed sources"),
]
HERE = Path(__file__).parent


def test_mindspeed_replaces_neither_method_that_the_fix_touches():
    sources = Path(os.environ["MINDSPEED_CHECKOUT"]).rglob("*.py")
    touching = [file for file in sources if "MLASelfAttention." in file.read_text(errors="replace")]
    assert touching == []


@pytest.fixture
def bench(monkeypatch):
    from atlasrl.selftest import workbench as selftest_workbench

    monkeypatch.setenv("PYTHONPATH", str(HERE))
    plugins = selftest_workbench.plugins
    monkeypatch.setattr(selftest_workbench, "plugins", lambda recipe: [*plugins(recipe), "mindspeed_mla"])
    with selftest_workbench.workbench(workers=2) as bench:
        yield bench


def test_the_rotary_key_loses_gradient_on_an_npu_too_and_the_same_fix_mends_it(bench):
    trial = Trial(layout=Layout(tensor=2, expert=2))
    mended = bench.run(trial)
    assert mended.ok, table(mended)
    broken = bench.run(Trial(layout=trial.layout, without=("mla-rotary-key",)))
    assert "self_attn.kv_a_proj_with_mqa.weight" in broken.wrong[0].name or len(broken.wrong) > 100
    assert not broken.ok
