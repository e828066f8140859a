"""The two ways from config.json to Megatron's settings, with the real mbridge and the real verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl.rundir import RunDir
from atlasrl.site import Site

ROOT = Path(__file__).resolve().parents[2]
SECTION = "actor_rollout_ref.actor.megatron.override_transformer_config."

pytestmark = pytest.mark.verl


def probe_bridges(folder: Path, config: dict, *changes: str, **environment: str) -> subprocess.CompletedProcess:
    """bin/probe bridges of a planned run whose model is only a config.json; in a process of its own, as it patches."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    run = RunDir(folder / "run")
    run.path.mkdir()
    loaded = recipes.load("tiny", [f"model.path={folder / 'model'}", *changes])
    run.plan.write_text(plans.make(loaded, Site(), run).to_json())
    command = [sys.executable, "-m", "atlasrl.cli.probe", "bridges", str(run.path)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "pylib"), str(ROOT)])}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path, **environment})


def tiny_config() -> dict:
    return json.loads((ROOT / "jobs/inputs/tiny/model/config.json").read_text())


def test_router_settings_of_latent_attention_models_differ_and_are_named(tmp_path):
    done = probe_bridges(tmp_path, tiny_config())
    assert done.returncode == 1, done.stderr
    assert f"{SECTION}moe_router_load_balancing_type: none | seq_aux_loss" in done.stdout
    assert f"{SECTION}moe_router_num_groups: 2 | None" in done.stdout, "the fix of mbridge counts here"
    assert f"{SECTION}moe_router_dtype: float32 | fp64" in done.stdout
    assert "refuses a quantized model; compared as BF16" in done.stdout


def test_overrides_of_the_run_and_fixes_left_out_count_on_both_sides(tmp_path):
    balancing = f"verl.{SECTION}moe_router_load_balancing_type=none"
    done = probe_bridges(tmp_path, tiny_config(), balancing, ATLASRL_WITHOUT_FIX="router-groups")
    assert "seq_aux_loss" not in done.stdout
    assert "moe_router_num_groups" not in done.stdout, "without the fix both ways forget the groups"
    assert "moe_router_dtype: float32 | fp64" in done.stdout
