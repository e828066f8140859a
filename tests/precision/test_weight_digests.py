"""The watch over weight syncs names every tensor that did not come over, and no other."""

from __future__ import annotations

import asyncio
import json

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from atlasrl.errors import Fault  # noqa: E402
from atlasrl.precision import weights  # noqa: E402

pytestmark = pytest.mark.verl


class Rollout:
    """A rollout as verl knows it; `skip` stays as it was, W_UV is derived once (or after every sync)."""

    def __init__(self, skip=None, derive="after every sync"):
        self.model = torch.nn.ModuleDict({name: torch.nn.Linear(12, 12, bias=False) for name in ("q", "kv", "o", "up")})
        self.skip, self.derive = skip, derive
        self.after_loading()

    def after_loading(self):
        self.model.W_UV = self.model["kv"].weight.detach()[:6].T.contiguous()

    async def update_weights(self, sent, **kwargs):
        with torch.no_grad():
            for name, tensor in sent:
                if name != self.skip:
                    dict(self.model.named_parameters())[name].copy_(tensor)
        if self.derive == "after every sync":
            self.after_loading()


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Sync `count` updated versions of the training weights into a watched rollout; the syncs that were recorded."""
    sync_plugin = pytest.importorskip("atlasrl.trainer.sync_plugin")

    def run(rollout: Rollout, count=2, frozen=None, watched=2):
        monkeypatch.setenv(sync_plugin.WATCH_SYNCS, str(watched))
        monkeypatch.setenv(sync_plugin.WATCH_FOLDER, str(tmp_path))
        rollout.__class__ = sync_plugin.watched(type(rollout))
        training = {f"{name}.weight": torch.randn(12, 12) for name in ("q", "kv", "o", "up")}
        for _ in range(count):
            asyncio.run(rollout.update_weights(iter(training.items())))
            training = {n: t if n == frozen else t + torch.randn_like(t) for n, t in training.items()}
        return weights.read(tmp_path)["worker-0"]

    return run


def test_a_sync_that_works_raises_no_suspicion_and_is_counted(watch):
    syncs = watch(Rollout(), count=3)
    assert [line["sync"] for line in syncs] == [1, 2], "only the first two are watched"
    assert list(weights.suspicions(syncs)) == []
    assert syncs[0]["before"] != syncs[0]["after"] == syncs[1]["before"]


def test_a_tensor_that_the_sync_skips_is_named_in_every_sync(watch):
    found = list(weights.suspicions(watch(Rollout(skip="o.weight"))))
    assert [str(s) for s in found] == [
        f"sync {sync}: o.weight differs between training and rollout after the sync" for sync in (1, 2)
    ]


def test_a_stale_derived_weight_is_named_with_its_source(watch, capsys):
    found = list(weights.suspicions(watch(Rollout(derive="once"), count=1)))
    assert [str(s) for s in found] == ["sync 1: W_UV is a copy from kv.weight and was not updated with it"]
    assert "warning: sync 1: W_UV is a copy from kv.weight and was not updated with it" in capsys.readouterr().out


def test_a_weight_that_training_never_moves_is_named(watch):
    syncs = watch(Rollout(), frozen="up.weight")
    assert weights.unmoved(syncs) == ["up.weight"] and weights.unmoved(syncs[:1]) == []
    assert list(weights.suspicions(syncs)) == [], "it reached the rollout all the same"


def test_a_fused_rollout_tensor_left_as_it_was_is_suspicious_among_others_that_changed():
    """vLLM names: no tensor of the rollout has a counterpart by name."""
    before = {f"layers.{i}.qkv_proj.weight": ["a", 1.0] for i in range(4)}
    after = {**{name: ["b", 1.0] for name in before}, "layers.3.qkv_proj.weight": ["a", 1.0]}
    line = {"sync": 1, "sent": {"q": ["c", 1.0]}, "before": before, "after": after}
    assert [s.tensor for s in weights.suspicions([line])] == ["layers.3.qkv_proj.weight"]
    unchanged = {**line, "after": before}
    assert list(weights.suspicions([unchanged])) == [], "weights that were loaded from the same files"


def test_replicas_that_have_diverged_are_told_apart():
    sent = {"q": ["a", 1.0], "k": ["b", 1.0]}
    workers = {
        "worker-0": [{"sync": 1, "sent": sent}],
        "worker-1": [{"sync": 1, "sent": {**sent, "k": ["c", 1.0]}}],
    }
    assert [str(s) for s in weights.disagreements(workers)] == ["sync 1: k of worker-1 differs from that of worker-0"]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_digest_sees_any_bit_and_any_swap(data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    tensor = torch.randn(7, 9, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))).mul(9).to(dtype)
    same = weights.digest(tensor)
    assert weights.digest(tensor.T.contiguous().T) == same
    bits = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).flatten()
    place, bit = data.draw(st.integers(0, 62)), data.draw(st.integers(0, dtype.itemsize * 8 - 2))
    flipped = bits.clone()
    flipped[place] ^= 1 << bit
    assert weights.digest(flipped) != same
    other = data.draw(st.integers(0, 62))
    swapped = bits.clone()
    swapped[[place, other]] = swapped[[other, place]]
    assert (weights.digest(swapped) == same) == (bits[place] == bits[other])


def test_digests_of_large_tensors_do_not_depend_on_the_chunks(monkeypatch):
    tensor = torch.randn(10_001)
    whole = weights.digest(tensor)
    monkeypatch.setattr(weights, "CHUNK", 97)
    assert weights.digest(tensor) == whole


def test_the_table_shows_init_sent_and_after(watch):
    text = list(weights.lines_of(watch(Rollout(skip="o.weight"), count=1), ["o.weight"]))
    assert [line.split()[:3] for line in text[1:]] == [
        ["init", "rollout", text[1].split()[2]],
        ["sync", "1", "training"],
        ["after", "1", "rollout"],
    ]
    assert text[1].split()[2] == text[3].split()[3], "the skipped tensor still has its first digest"


def test_an_attempt_that_was_not_watched_says_how(tmp_path):
    with pytest.raises(Fault, match=r"probe\.syncs"):
        weights.read(tmp_path)


def test_lines_are_plain_json(watch, tmp_path):
    watch(Rollout(), count=1)
    [line] = (tmp_path / "worker-0.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == {"sync", "sent", "before", "after", "stale"}
