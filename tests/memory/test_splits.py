"""Legality and search, held against a brute-force dealer that hands out layers, heads, experts and ranks one by one."""

import dataclasses
import itertools
import time

import pytest

from atlasrl import recipe as recipes
from atlasrl.errors import UsageFault
from atlasrl.legality import (
    RolloutSplit,
    Split,
    broken_batch_rules,
    broken_rollout_rules,
    broken_rules,
    stage_layers,
)
from atlasrl.memory import architecture, job, model, planner, shapes, verdict
from atlasrl.memory.activations import Recompute
from atlasrl.memory.job import GIB, Job

SMALL = architecture.from_config(
    {
        **shapes.CONFIGS["DeepSeek-V3"],
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "moe_intermediate_size": 36,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 12,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
)
SEQUENCE = 24


def dealt_fairly(a, s: Split, devices_per_node: int) -> bool:
    """Place every part of the model on every rank, as Megatron orders them, and look whether each part has an owner."""
    try:
        dense = {}  # rank -> (tensor, context, data, pipeline) coordinates, tensor fastest
        replicas, rest = divmod(s.world, s.tensor * s.context * s.pipeline)
        mixed, left = divmod(s.world, s.expert_tensor * s.expert * s.pipeline)
        if rest or left or not replicas or not mixed:
            return False
        shape = (s.pipeline, replicas, s.context, s.tensor)
        for rank, place in enumerate(itertools.product(*map(range, shape))):
            dense[rank] = place
        nodes_of_tensor_group = {}
        for rank, (p, d, c, _) in dense.items():
            nodes_of_tensor_group.setdefault((p, d, c), set()).add(rank // devices_per_node)
        if any(len(nodes) > 1 for nodes in nodes_of_tensor_group.values()):
            return False
        for size in (a.heads, a.vocabulary, a.hidden, a.intermediate):
            if len({len(range(t, size, s.tensor)) for t in range(s.tensor)}) > 1:
                return False
        owners = [
            sum(1 for e in range(a.experts.count) if e * s.expert // a.experts.count == r) for r in range(s.expert)
        ]
        if len(set(owners)) > 1 or any(
            len(range(t, a.experts.width, s.expert_tensor)) * s.expert_tensor != a.experts.width
            for t in range(s.expert_tensor)
        ):
            return False
        chunks = [1] * (2 * s.context)
        tokens = list(range(SEQUENCE))
        if s.context > 1 and sum(len(tokens) // len(chunks) for _ in chunks) != len(tokens):
            return False
        stages = [n for n in s.stages for _ in range(s.virtual)]
        per_chunk = [n / s.virtual for n in stages]
        return (
            len(s.stages) == s.pipeline
            and sum(per_chunk) == a.layers
            and all(n == int(n) and n >= 1 for n in per_chunk)
            and (s.virtual == 1 or s.pipeline > 1)
        )
    except ZeroDivisionError:
        return False


@pytest.mark.parametrize("world", [6, 8, 12])
def test_the_rules_agree_with_the_dealer(world):
    """Both ways: nothing illegal passes, nothing legal is refused."""
    seen = {True: 0, False: 0}
    sizes = (1, 2, 3, 4)
    for tensor, pipeline, expert, expert_tensor, context, virtual in itertools.product(
        sizes, sizes, sizes, (1, 2, 5), (1, 2, 3), (1, 2)
    ):
        stages = stage_layers(SMALL.layers, pipeline)
        s = Split(world, tensor, pipeline, expert, expert_tensor, context, virtual, stages)
        legal = next(broken_rules(SMALL, s, 4, SEQUENCE), None) is None
        assert legal == dealt_fairly(SMALL, s, 4), (s, list(broken_rules(SMALL, s, 4, SEQUENCE)))
        seen[legal] += 1
    assert min(seen.values()) > 20, "both kinds occur"


def test_every_split_the_search_finds_is_legal_for_the_dealer():
    j = Job(
        device=GIB,
        devices_per_node=4,
        sequence=SEQUENCE,
        tokens=SEQUENCE,
        micro_batches=4,
        batch_sequences=16,
        rollout_activations=0,
        runtime=0,
        buffer=0,
    )
    for world in (8, 12, 16):
        found = planner.search(SMALL, world, 4, lambda s: j)
        assert len({c.split for c in found}) == len(found) > 10
        assert all(dealt_fairly(SMALL, c.split, 4) for c in found)
        assert [c.cost for c in found] == sorted(c.cost for c in found)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"tensor": 5}, "attention heads"),
        ({"expert": 5}, "12 experts"),
        ({"pipeline": 4}, "first_stage_layers"),
        ({"context": 5}, "2 x CP"),
        ({"tensor": 8}, "crosses nodes"),
        ({"virtual": 2}, "VPP 2 needs PP > 1"),
    ],
)
def test_a_broken_rule_says_which(changes, word):
    s = Split(**{"world": 120, "stages": stage_layers(6, changes.get("pipeline", 1)), **changes})
    assert any(word in rule for rule in broken_rules(SMALL, s, 4, SEQUENCE))


@pytest.mark.parametrize(
    ("layers", "pipeline", "first", "last", "expected"),
    [
        (61, 16, 3, 2, (3, *[4] * 14, 2)),
        (61, 8, 7, 6, (7, *[8] * 6, 6)),
        (61, 12, None, 6, (*[5] * 11, 6)),
        (27, 2, 14, 13, (14, 13)),
        (27, 2, 14, 14, ()),
        (61, 16, None, None, ()),
        (4, 4, 3, None, ()),
        (6, 1, None, None, (6,)),
        (6, 1, 3, None, ()),
    ],
)
def test_layers_of_the_stages(layers, pipeline, first, last, expected):
    assert stage_layers(layers, pipeline, first, last) == expected


@pytest.mark.parametrize(
    ("rollout", "world", "words"),
    [
        (RolloutSplit(8, 64), 256, []),
        (RolloutSplit(16, 64), 256, ["does not divide the 8 devices"]),
        (RolloutSplit(8, 96), 256, ["no multiple of the 96", "rollout EP 96"]),
        (RolloutSplit(8, 12), 240, ["rollout EP 12", "verl: EP = TP x DP"]),
    ],
)
def test_rollout_rules(rollout, world, words):
    broken = list(broken_rollout_rules(shapes.find("DeepSeek-V3"), rollout, world, 8))
    assert bool(broken) == bool(words)
    assert all(any(word in rule for rule in broken) for word in words)


def test_batches_that_do_not_divide_are_named():
    recipe = recipes.load("deepseek-v3-671b-dapo", ["dapo.train_batch_size=100", "dapo.tokens_per_device=4096"])
    broken = list(broken_batch_rules(recipe, 3))
    assert [
        word
        for word in ("train_batch_size 100 x 16", "mini_batch_size 32 x 16", "tokens_per_device 4096")
        if any(word in rule for rule in broken)
    ] == [
        "train_batch_size 100 x 16",
        "mini_batch_size 32 x 16",
        "tokens_per_device 4096",
    ]
    assert any("no multiple of mini_batch_size" in rule for rule in broken)


def article_ranking():
    return verdict.ranked(recipes.load("deepseek-v3-671b-dapo"), nodes=32)


def test_the_search_finds_the_published_split_and_explains_its_rank():
    from atlasrl.memory import report

    ranking = article_ranking()
    assert str(ranking.own.split) == "TP8 PP16 EP16 [3/4x14/2]"
    place = ranking.found.index(ranking.own)
    assert 0 < place < len(ranking.found) / 4
    best = ranking.found[0]
    reason = report.rank_reason(ranking.found, ranking.own)
    assert f"number {place + 1} of {len(ranking.found)}" in reason
    dearer = max(ranking.own.seconds, key=lambda cause: ranking.own.seconds[cause] - best.seconds.get(cause, 0))
    assert dearer in reason


def test_search_of_32_nodes_takes_less_than_two_seconds():
    article_ranking()
    started = time.process_time()
    article_ranking()
    assert time.process_time() - started < 2


def test_what_the_search_skips_is_never_the_tightest_stage():
    """It leaves out stages that an earlier one of the same make exceeds; a full prediction must agree."""
    a = shapes.find("DeepSeek-V3")
    r = recipes.load("deepseek-v3-671b-dapo")
    split, j = job.of_recipe(r, a)
    for tensor, recompute in itertools.product((2, 8), ("none", "full")):
        s = dataclasses.replace(split, tensor=tensor)
        each = dataclasses.replace(job.batched(j, r, s), recompute=Recompute(recompute), device=1000 * GIB)
        full, quick = model.predict(a, s, each), planner.fitting(a, s, each)
        assert quick.tightest[2] == full.tightest[2]


def test_an_illegal_recipe_names_every_broken_rule_at_once():
    with pytest.raises(UsageFault) as fault:
        verdict.of_recipe(recipes.load("deepseek-v3-671b-dapo", ["parallel.tensor=3", "rollout.tensor=16"]))
    assert "attention heads 128 is no multiple of TP 3" in str(fault.value)
    assert "rollout TP 16 does not divide" in str(fault.value)


def test_remedies_do_what_they_say():
    """Each remedy that is a recipe change is applied to the recipe, and the new prediction shows its numbers."""
    changes = ["parallel.recompute=none", "parallel.offload=false", "parallel.optimizer_on_host=0.5"]
    before = verdict.of_recipe(recipes.load("deepseek-v3-671b-dapo", changes))
    assert not before.prediction.fits
    applied = 0
    for remedy in before.remedies:
        if "(" in remedy.change or remedy.change.startswith("half"):
            continue
        key, _, rest = remedy.change.partition(" ")
        extra = [f"parallel.{part}" for part in rest.split()]
        try:
            after = verdict.of_recipe(recipes.load("deepseek-v3-671b-dapo", [*changes, *extra, key]))
        except UsageFault as fault:
            pytest.fail(f"{remedy.change} is not applicable: {fault}")
        assert after.prediction.tightest[2] == remedy.peak, remedy.change
        assert remedy.saved > 0
        applied += 1
    assert applied >= 3


def test_remedies_taken_together_make_it_fit():
    changes = ["parallel.offload=false", "parallel.recompute=none", "parallel.expert=1"]
    before = verdict.of_recipe(recipes.load("moonlight-16b-dapo", changes))
    assert not before.prediction.fits
    assert not any(remedy.fits for remedy in before.remedies)
    taken = [remedy.change for remedy in before.together]
    after = verdict.of_recipe(recipes.load("moonlight-16b-dapo", [*changes, *taken]))
    assert after.prediction.fits
    assert after.prediction.tightest[2] == before.together[-1].peak


@pytest.mark.parametrize(
    ("recipe", "nodes", "fits", "words"),
    [
        ("deepseek-v3-671b-dapo", 32, True, "fits: rollout"),
        ("deepseek-v3-671b-dapo", 30, False, "the split is illegal: 240 devices"),
        ("tiny", 1, None, "not predicted"),
    ],
)
def test_the_sentence_for_a_plan(recipe, nodes, fits, words):
    loaded = recipes.load(recipe)
    sentence, answer = verdict.in_one_line(loaded, nodes, loaded.devices_per_node)
    assert answer is fits
    assert sentence.startswith(words)
