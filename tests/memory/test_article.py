"""The numbers that a public report of DAPO with DeepSeek-V3 671B on 256 NPUs printed, digit by digit.

Its set-up: TP 8, PP 16 with 3 and 2 layers at the ends, EP 16; micro-batches of one answer of 2k + 2k tokens. Its "GB"
are GiB. Where the report contradicts itself (the static memory, the logits without TP) no number is derived here.
"""

from decimal import ROUND_HALF_UP, Decimal

import pytest

from atlasrl.legality import RolloutSplit, Split, stage_layers
from atlasrl.memory import activations, model, parameters, shapes
from atlasrl.memory.activations import Recompute
from atlasrl.memory.job import GIB, MIB, Job

DEEPSEEK = shapes.find("DeepSeek-V3")
MOONLIGHT = shapes.find("Moonlight-16B-A3B")
TOKENS = 4096
PP16 = Split(256, 8, 16, 16, stages=stage_layers(61, 16, 3, 2))
PP8 = Split(256, 8, 8, 16, stages=stage_layers(61, 8, 7, 6))
ROLLOUT = RolloutSplit(8, 64)


def printed(bytes_per_token: int, digits: str) -> str:
    """GiB of 4096 tokens with as many digits as the report printed, rounded half up as it did."""
    return str((Decimal(bytes_per_token * TOKENS) / GIB).quantize(Decimal(digits), ROUND_HALF_UP))


DENSE = activations.layer_bytes(DEEPSEEK, True, 8)
MIXTURE = activations.layer_bytes(DEEPSEEK, False, 8)
LOSS = activations.logits_bytes(DEEPSEEK, 8, per_logit=4)
EMBEDDING = activations.input_bytes(DEEPSEEK, 8)


@pytest.mark.parametrize(
    ("bytes_per_token", "gib"),
    [
        (EMBEDDING, "0.006835938"),
        (LOSS, "0.246582031"),
        (DENSE, "0.15435791"),
        (MIXTURE, "0.578186035"),
        (3 * DENSE + 58 * MIXTURE + LOSS, "34.2444458"),
        (EMBEDDING + LOSS, "0.253417969"),
    ],
)
def test_activations_are_the_printed_ones(bytes_per_token, gib):
    assert printed(bytes_per_token, gib) == gib


def test_activations_per_token():
    assert (DENSE, MIXTURE, LOSS, EMBEDDING) == (40_464, 151_568, 64_640, 1_792)
    assert activations.layer_bytes(DEEPSEEK, False, 8, shared_split=True) == MIXTURE, "both readings give the same sum"
    assert activations.layer_bytes(MOONLIGHT, True, 2) == 52_288
    assert activations.layer_bytes(MOONLIGHT, False, 2) == 146_752
    assert MIXTURE - DENSE == 62 * EMBEDDING


def test_logits_of_the_report_lack_the_split_of_the_vocabulary():
    tokens = 5 * 14 * 1024
    assert 4 * tokens * 128 * 1024 == 35 * GIB, "what it printed: 131,072 words, no TP"
    assert round(tokens * LOSS / GIB, 6) == 4.315186


def test_splits_of_the_report():
    assert (PP16.data, PP16.expert_data) == (2, 1)
    assert (PP8.data, PP8.expert_data) == (4, 2)
    assert PP16.stages == (3, *[4] * 14, 2)
    assert PP8.stages == (7, *[8] * 6, 6)


@pytest.mark.parametrize(
    ("split", "rank", "dense", "expert"),
    [
        (PP16, 0, 334_684_160, 0),
        (PP16, 2, 122_979_328, 2_818_572_288),
        (PP16, 15, 177_331_712, 1_409_286_144),
        (PP8, 0, 457_663_488, 2_818_572_288),
        (PP8, 2, 245_958_656, 5_637_144_576),
        (PP8, 7, 300_311_040, 4_227_858_432),
    ],
)
def test_parameters_of_a_rank(split, rank, dense, expert):
    assert parameters.stage(DEEPSEEK, split, rank) == (dense, expert)


@pytest.mark.parametrize(
    ("split", "rank", "weights", "gradients", "optimizer", "together"),
    [
        (PP16, 0, 0.623, 1.247, 1.870, 3.740),
        (PP16, 2, 5.479, 10.958, 32.187, 48.624),
        (PP16, 15, 2.955, 5.911, 16.741, 25.607),
        (PP8, 0, 6.102, 12.205, 17.029, 35.336),
        (PP8, 2, 10.958, 21.916, 32.187, 65.062),
        (PP8, 7, 8.434, 16.869, 24.464, 49.767),
    ],
)
def test_static_memory_of_a_rank(split, rank, weights, gradients, optimizer, together):
    job = Job(device=64 * GIB, rollout=ROLLOUT)
    stage = model.stage(DEEPSEEK, split, job, rank, model.shared_terms(DEEPSEEK, split, job))
    step = [stage.phases["step"][term] for term in ("weights", "gradients", "optimizer")]
    assert [round(size / GIB, 3) for size in (*step, sum(step))] == [weights, gradients, optimizer, together]


def test_middle_stage_to_the_byte():
    count = parameters.stage(DEEPSEEK, PP16, 2)
    job = Job(device=64 * GIB)
    assert 2 * count.total == 5_883_103_232
    assert 4 * count.total == 11_766_206_464
    assert model.optimizer_bytes(count, PP16, job) == 34_560_743_424


def test_rollout_weights():
    assert parameters.rollout(DEEPSEEK, ROLLOUT) == (3_041_760_768, 10_217_324_544)
    assert parameters.absorbed_copies(DEEPSEEK, ROLLOUT) == 127_926_272
    weights = model.rollout_weights(DEEPSEEK, ROLLOUT)
    assert round(weights["rollout weights"] / GIB, 4) == 24.6970
    assert round(sum(weights.values()) / GIB, 4) == 24.9353


@pytest.mark.parametrize(("fraction", "tokens"), [(0.6, 175_104), (0.9, 468_480)])
def test_kv_tokens(fraction, tokens):
    job = Job(device=64 * GIB, rollout=ROLLOUT, memory_fraction=fraction, rollout_activations=2 * GIB)
    assert model.cache_tokens(DEEPSEEK, job) == tokens


@pytest.mark.parametrize(
    ("name", "tensor", "size"),
    [
        ("DeepSeek-V3", 1, 70_272),
        ("DeepSeek-V3", 8, 70_272),
        ("Moonlight-16B-A3B", 1, 31_104),
        ("Qwen3-30B-A3B", 4, 24_576),
        ("Qwen2.5-7B", 1, 57_344),
    ],
)
def test_kv_bytes_of_a_token(name, tensor, size):
    assert parameters.cache_bytes_per_token(shapes.find(name), tensor) == size


def test_communication_is_in_the_printed_range():
    size = model.communication_bytes(PP16, Job(device=64 * GIB, rollout=ROLLOUT, buffer=200 * MIB))
    assert 6 <= size / GIB <= 8, "the report measured 6 to 8 GB"


@pytest.mark.parametrize(
    ("pipeline", "rank", "micro_batches", "virtual", "flying"),
    [(16, 0, 32, 1, 16), (16, 15, 32, 1, 1), (16, 0, 4, 1, 4), (16, 0, 64, 2, 47)],
)
def test_micro_batches_in_flight(pipeline, rank, micro_batches, virtual, flying):
    assert activations.in_flight(pipeline, rank, micro_batches, virtual) == flying


def test_interleaving_costs_what_megatron_says():
    """Megatron's theoretical_memory_usage: 1 + (pp - 1) / (pp x vpp) times a stage's activations, on rank 0."""
    for pipeline, virtual in ((4, 2), (8, 3), (16, 2)):
        chunks = activations.in_flight(pipeline, 0, 1000, virtual)
        assert chunks / virtual == pipeline * (1 + (pipeline - 1) / (pipeline * virtual))


def test_the_transient_the_report_left_out():
    """One recomputed mixture layer at 5 x 14,336 tokens, and the layer inputs of the micro-batches in flight."""
    tokens = 5 * 14 * 1024
    act = activations.of_stage(DEEPSEEK, PP16, 1, tokens, 16, Recompute("full"))
    assert round(act.transient / GIB, 3) == 10.118
    assert round(act.kept / GIB, 3) == 7.178
