"""The article's bug with the real mbridge: a key nobody yields costs a shard; repair prevents it, verify shows it."""

import importlib.util
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from defects import FIRST, INV_FREQ, SECOND, edit_config, list_also, reindex
from tiny_checkpoints import deepseek, read_weight_map

from ckpt_tools.cast import cast
from ckpt_tools.checkpoint import read_checkpoint
from ckpt_tools.mbridge import predict_unsaved
from ckpt_tools.repair import repair
from ckpt_tools.repair_plan import Wishes, plan_repair
from ckpt_tools.verify import verify

VERSIONS = ["0.13.1", "0.15.1"]


def installed(version: str) -> Path:
    """The package's folder: from the environment, or installed once (alone, no dependencies) into pytest's cache."""
    import importlib.metadata

    if importlib.metadata.version("mbridge") == version:
        return Path(importlib.util.find_spec("mbridge").origin).parent
    scratch = Path(__file__).resolve().parents[2] / ".pytest_cache" / f"mbridge-{version}"
    if not (scratch / "mbridge" / "core" / "safetensor_io.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(scratch)]
        run = subprocess.run([*pip, f"mbridge=={version}"], capture_output=True, text=True, timeout=120)
        if run.returncode:
            pytest.skip(f"mbridge {version} cannot be installed here: {run.stderr.strip().splitlines()[-1]}")
    return scratch / "mbridge"


@pytest.fixture(params=VERSIONS)
def safetensor_io(request):
    """mbridge's own SafeTensorIO class, loaded from its file: the rest of the package wants a GPU."""
    file = installed(request.param) / "core" / "safetensor_io.py"
    spec = importlib.util.spec_from_file_location(f"mbridge_io_{request.param.replace('.', '_')}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SafeTensorIO


def load_weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def train_and_save(safetensor_io, source: Path, target: Path) -> list[str]:
    """Save through mbridge what a trainer yields: every weight of the model, no buffer and no MTP layer.

    Returns:
        the warnings that were given.
    """
    target.mkdir()
    yielded = ((n, t) for n, t in load_weights(source).items() if ".layers.3." not in n and "inv_freq" not in n)
    writer = safetensor_io(str(source))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        writer.save_hf_weight(yielded, str(target), [])
        writer.save_index(str(target))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return [str(warning.message) for warning in caught]


def lost_files(source: Path, target: Path) -> set[str]:
    return {file for file in set(read_weight_map(source).values()) if not (target / file).exists()}


def predicted_files(folder: Path) -> set[str]:
    checkpoint = read_checkpoint(folder)
    return {loss.file for loss in predict_unsaved(checkpoint.index.weight_map, checkpoint.config)}


@pytest.fixture
def source(tmp_path):
    """A checkpoint without MTP whose index is right."""
    return deepseek(tmp_path / "source", fp8=False, num_nextn_predict_layers=0)


@pytest.mark.verl
def test_a_sound_index_is_saved_whole_as_predicted(safetensor_io, source, tmp_path):
    assert predicted_files(source) == set()
    assert train_and_save(safetensor_io, source, tmp_path / "saved") == []
    assert verify(tmp_path / "saved").errors == []


@pytest.mark.verl
def test_a_stale_inv_freq_loses_its_shard_and_repair_prevents_it(safetensor_io, source, tmp_path):
    """Megatron-Bridge#1838, the article's case."""
    list_also(source, INV_FREQ, SECOND)
    assert predicted_files(source) == {SECOND}
    warned = train_and_save(safetensor_io, source, tmp_path / "lossy")
    assert lost_files(source, tmp_path / "lossy") == {SECOND}
    assert any("not saved" in text for text in warned), "all that a user gets is a warning"
    assert "missing_file" in verify(tmp_path / "lossy").kinds()

    repair(plan_repair(read_checkpoint(source), Wishes()))
    assert predicted_files(source) == set()
    train_and_save(safetensor_io, source, tmp_path / "whole")
    assert verify(tmp_path / "whole").errors == []


@pytest.mark.verl
def test_an_mtp_layer_that_is_not_trained_loses_its_shard_and_repair_prevents_it(safetensor_io, tmp_path):
    """mbridge#119."""
    source = deepseek(tmp_path / "source", fp8=False)
    edit_config(source, num_nextn_predict_layers=0)
    predicted = predicted_files(source)
    assert predicted
    train_and_save(safetensor_io, source, tmp_path / "lossy")
    assert lost_files(source, tmp_path / "lossy") == predicted
    assert verify(tmp_path / "lossy").errors

    repair(plan_repair(read_checkpoint(source), Wishes(drop_mtp=True)))
    assert predicted_files(source) == set()
    train_and_save(safetensor_io, source, tmp_path / "whole")
    assert verify(tmp_path / "whole").errors == []


@pytest.mark.verl
def test_with_memory_efficient_the_same_index_ends_in_an_exception(safetensor_io, source, tmp_path):
    list_also(source, INV_FREQ, SECOND)
    (tmp_path / "saved").mkdir()
    weights = iter(load_weights(source).items())
    with pytest.raises(FileNotFoundError):
        safetensor_io(str(source)).save_hf_weight_memory_efficient(weights, str(tmp_path / "saved"))


@pytest.mark.verl
def test_what_was_trained_from_fp8_cannot_be_saved_until_the_checkpoint_is_cast(safetensor_io, tmp_path):
    """Report D4: no memory-efficient save of an FP8 model ends well: a TypeError in mbridge's main, here no file."""
    fp8, bf16 = deepseek(tmp_path / "fp8", num_nextn_predict_layers=0), tmp_path / "bf16"
    cast(fp8, bf16)
    assert predicted_files(fp8) == set(read_weight_map(fp8).values())
    for target in ("lossy", "whole"):
        (tmp_path / target).mkdir()
    with pytest.raises(FileNotFoundError, match="scale_inv"):
        safetensor_io(str(fp8)).save_hf_weight_memory_efficient(iter(load_weights(bf16).items()), tmp_path / "lossy")

    assert predicted_files(bf16) == set()
    writer = safetensor_io(str(bf16))
    writer.save_hf_weight_memory_efficient(iter(load_weights(bf16).items()), tmp_path / "whole")
    writer.save_index(tmp_path / "whole")
    shutil.copy(bf16 / "config.json", tmp_path / "whole")
    assert verify(tmp_path / "whole").errors == []


def test_the_prediction_names_keys_reasons_and_trained_tensors(source):
    list_also(source, INV_FREQ)
    list_also(source, "model.layers.0.mlp.up_proj.weight_scale_inv")
    checkpoint = read_checkpoint(source)
    (loss,) = predict_unsaved(checkpoint.index.weight_map, checkpoint.config)
    assert loss.file == FIRST
    assert loss.blocking[INV_FREQ] == "a buffer, not a weight"
    assert "FP8 scale" in loss.blocking["model.layers.0.mlp.up_proj.weight_scale_inv"]
    assert set(loss.lost) == checkpoint.headers[FIRST].tensors.keys()


def test_a_trained_tensor_without_a_place_in_the_index_is_predicted_lost(source):
    weight_map = read_weight_map(source)
    del weight_map["model.norm.weight"]
    config = json.loads((source / "config.json").read_text())
    (loss,) = predict_unsaved(weight_map, config)
    assert (loss.file, loss.lost) == (None, ("model.norm.weight",))


def test_mtp_of_a_cut_model_is_predicted_lost(tmp_path):
    """mbridge converts one MTP layer, and only behind 61 layers."""
    folder = deepseek(tmp_path / "model", fp8=False)
    assert predicted_files(folder)
    reindex(folder)
    edit_config(folder, num_hidden_layers=61)
    checkpoint = read_checkpoint(folder)
    losses = predict_unsaved(checkpoint.index.weight_map, checkpoint.config)
    assert not [loss for loss in losses if loss.blocking]


def test_a_listed_lm_head_of_a_tied_model_is_predicted_to_cost_its_shard(source):
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    losses = predict_unsaved(read_weight_map(source), config)
    assert [loss.blocking for loss in losses] == [{"lm_head.weight": "tied to the embedding"}]
