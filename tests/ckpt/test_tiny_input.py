"""The checkpoint that the recipe `tiny` starts from: cast as the job casts it, it is clean for training."""

from pathlib import Path

import pytest
from test_cast import assert_cast

from ckpt_tools.cast import cast
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.mbridge import predict_unsaved
from ckpt_tools.verify import verify

MODEL = Path(__file__).resolve().parents[2] / "jobs" / "inputs" / "tiny" / "model"


@pytest.mark.skipif(not MODEL.is_dir(), reason="jobs/inputs/tiny/model is not made")
def test_the_tiny_input_becomes_a_checkpoint_that_mbridge_saves_whole(tmp_path):
    assert "stale_key" in verify(MODEL).kinds(), "the input is meant to have the article's defect"
    result = cast(MODEL, tmp_path / "model", mtp="drop")
    layers = read_checkpoint(MODEL).config["num_hidden_layers"]
    assert_cast(MODEL, tmp_path / "model", left_out=f".layers.{layers}.")
    assert any("inv_freq" in name for name in result.dropped)
    clean = read_checkpoint(tmp_path / "model")
    assert verify(clean.path).findings == []
    assert predict_unsaved(clean.index.weight_map, clean.config) == []
