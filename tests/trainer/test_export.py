"""The exported folder is held against the training checkpoint tensor by tensor."""

import pytest

from atlasrl.errors import Fault
from atlasrl.trainer.export import compare_with_training, write_shards

pytestmark = pytest.mark.verl


def test_a_tensor_that_is_not_the_trained_one_is_named(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    base, target = tmp_path / "base", tmp_path / "export"
    trained = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    for folder in (base, target):
        folder.mkdir()
    save_file({"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}, base / "model.safetensors")
    write_shards(base, target, trained.__getitem__)
    compare_with_training(target, trained.__getitem__)

    exported = load_file(target / "model.safetensors")
    exported["a"][2, 4] *= 1.01
    save_file(exported, target / "model.safetensors")
    with pytest.raises(Fault, match="a is not what the training checkpoint holds"):
        compare_with_training(target, trained.__getitem__)
