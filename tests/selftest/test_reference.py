"""The judge is judged: its loss by plain arithmetic, its batch by what it visits, its comparison by small lies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from atlasrl.selftest import batch as selftest_batch
from atlasrl.selftest import model as selftest_model
from atlasrl.selftest import reference as selftest_reference
from atlasrl.selftest.compare import judge
from atlasrl.selftest.reference import Rules, Step
from atlasrl.selftest.trial import SHAPE, Trial, partition, rules_of

pytestmark = pytest.mark.verl
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return selftest_model.make(tmp_path_factory.mktemp("selftest") / "model")


@pytest.fixture(scope="module")
def batch(model):
    return selftest_batch.record(model, SHAPE)


def by_hand(ratio: float, advantage: float) -> float:
    """DAPO's gain of one token, case by case."""
    if advantage >= 0:
        return advantage * min(ratio, 1.28)
    kept = max(ratio, 0.8)
    return advantage * min(kept, 10.0)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.06, 0.79, 0.81, 1.0, 1.27, 1.29, 9.9, 16.4])
def test_the_loss_of_one_token_is_the_one_of_the_papers(ratio, advantage):
    log_prob = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    old, gain, mask = torch.tensor([[-1.0]]), torch.tensor([[advantage]]), torch.ones(1, 1)
    loss = selftest_reference.dapo_loss(log_prob, old.double(), gain.double(), mask, Rules())
    loss.backward()
    assert loss.item() == pytest.approx(-by_hand(ratio, advantage))
    moves = by_hand(ratio * 1.001, advantage) != by_hand(ratio, advantage)
    assert (log_prob.grad.abs().item() > 0) == moves


def test_the_loss_is_a_mean_over_tokens_not_over_answers():
    log_probs = torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0], [3.0]]).expand(2, 3)
    loss = selftest_reference.dapo_loss(log_probs, log_probs, advantages, mask, Rules())
    assert loss.item() == pytest.approx(-(3 * 1.0 + 3.0) / 4)


def test_the_batch_visits_every_branch_of_the_loss_and_stays_off_the_edges(model, batch):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = policy(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits[:, selftest_batch.PROMPT - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
    real = batch["response_mask"].bool()
    ratio, gain = (log_probs - batch["old_log_probs"]).exp()[real], batch["advantages"][real]
    for edge in (0.8, 1.28, 10.0):
        assert (ratio - edge).abs().min() > 0.01
    branches = {
        "kept": (ratio > 0.8) & (ratio < 1.28),
        "clipped above": (ratio > 1.28) & (gain > 0),
        "clipped below": (ratio < 0.8) & (gain < 0),
        "high but kept": (ratio > 1.28) & (ratio < 10) & (gain < 0),
        "dual clip": (ratio > 10) & (gain < 0),
    }
    assert {name: bool(found.any()) for name, found in branches.items()} == dict.fromkeys(branches, True)


def test_the_batch_and_the_model_are_the_same_every_time(model, batch, tmp_path):
    again = selftest_batch.record(selftest_model.make(tmp_path / "again"), SHAPE)
    assert all(torch.equal(batch[name], again[name]) for name in batch)


def test_a_batch_survives_its_file(batch, tmp_path):
    selftest_batch.save(batch, tmp_path / "batch.safetensors")
    loaded = selftest_batch.load(tmp_path / "batch.safetensors")
    assert all(torch.equal(batch[name], loaded[name]) for name in batch)


@pytest.fixture(scope="module")
def reference(model, batch):
    trial = Trial()
    return selftest_reference.train(model, batch, partition(trial, [], SHAPE.answers), rules_of(trial))


def recorded(reference: list[Step], **changes) -> list[dict]:
    """What a faultless worker would have recorded."""
    steps = [
        {"grad_norm": step.grad_norm, "gradients": dict(step.gradients), "parameters": dict(step.parameters)}
        for step in reference
    ]
    return [{"rank": 0, "data_rank": 0, "steps": steps, "partitions": [], **changes}]


def test_a_faultless_worker_passes(reference):
    verdict = judge("faultless", recorded(reference), reference)
    assert verdict.ok and not verdict.wrong and verdict.compared > 500


NORM = "model.layers.2.self_attn.kv_a_layernorm.weight"


@pytest.mark.parametrize(("kind", "name"), [("gradients", "lm_head.weight"), ("gradients", NORM), ("parameters", NORM)])
def test_one_tensor_that_is_off_by_little_is_named(reference, kind, name):
    record = recorded(reference)
    wrong = record[0]["steps"][0][kind]
    wrong[name] = wrong[name] * (1 + 2e-4)
    verdict = judge("lie", record, reference)
    assert not verdict.ok
    assert [(row.name, row.step) for row in verdict.wrong] == [(name, 1)]


@pytest.mark.parametrize("number", [0, 1])
def test_an_update_that_was_not_made_is_found(reference, number):
    record = recorded(reference)
    record[0]["steps"][number]["parameters"][NORM] = (
        reference[number].parameters[NORM] - reference[number].changes[NORM]
    )
    assert judge("forgotten", record, reference).wrong[0].name == NORM


def test_a_missing_tensor_is_a_failure_not_a_smaller_comparison(reference):
    record = recorded(reference)
    del record[0]["steps"][0]["gradients"][NORM]
    verdict = judge("missing", record, reference)
    assert not verdict.ok and "1 gradients are missing" in verdict.problems[0]


def test_a_norm_that_does_not_fit_its_gradients_is_a_failure(reference):
    record = recorded(reference)
    record[0]["steps"][0]["grad_norm"] *= 1.001
    assert not judge("norm", record, reference).ok


def test_not_a_number_is_wrong(reference):
    record = recorded(reference)
    record[0]["steps"][0]["gradients"][NORM] = record[0]["steps"][0]["gradients"][NORM] * float("nan")
    assert not judge("nan", record, reference).ok


def test_the_reference_depends_on_how_the_batch_is_divided(model, batch):
    """Token means per micro batch: a comparison with another partition would be meaningless, so it must be visible."""
    whole = [[[(list(range(16)), 1.0)]]]
    halves = [[[(list(range(8)), 0.5), (list(range(8, 16)), 0.5)]]]
    norms = [selftest_reference.train(model, batch, steps, Rules())[0].grad_norm for steps in (whole, halves)]
    assert abs(norms[0] - norms[1]) > 1e-3


def test_weight_decay_follows_the_backend(model, batch):
    steps = partition(Trial(), [], SHAPE.answers)[:1]
    decayed, kept = (
        selftest_reference.train(model, batch, steps, replace(Rules(), decay_vectors=yes))[0].parameters[NORM]
        for yes in (True, False)
    )
    assert torch.allclose(kept - decayed, kept * Rules.learning_rate * Rules.weight_decay, rtol=0.05)
