"""Recorded rollouts: bitwise what was recorded, and refused for anything else."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from atlasrl.errors import Fault  # noqa: E402
from atlasrl.precision.rollouts import (  # noqa: E402
    Generation,
    Recording,
    Replay,
    file_of,
    read,
    recorded_steps,
    tokens_digest,
    write,
)

pytestmark = pytest.mark.verl

PROMPTS = ["3:aaaaaaaaaaaa", "0:bbbbbbbbbbbb"]
TOKENS = [tokens_digest([7, 8, 9]), tokens_digest([7, 8])]
SAMPLES, PROMPT, ANSWER = 3, 4, 6


def generation(seed=0, prompts=PROMPTS, tokens=TOKENS) -> Generation:
    generator = torch.Generator().manual_seed(seed)
    rows = SAMPLES * len(prompts)
    mask = torch.ones(rows, PROMPT + ANSWER, dtype=torch.long)
    mask[:, 0] = 0
    mask[1, PROMPT + 2 :] = 0
    asked = torch.randint(0, 70_000, (rows, PROMPT), generator=generator)
    answers = torch.randint(0, 70_000, (rows, ANSWER), generator=generator)
    tensors = {
        "prompts": asked,
        "responses": answers,
        "response_mask": mask[:, PROMPT:].clone(),
        "input_ids": torch.cat([asked, answers], 1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_(min=0),
        "rollout_log_probs": torch.randn(rows, ANSWER, generator=generator),
    }
    return Generation(list(prompts), list(tokens), tensors, {"__num_turns__": ["int32", [2] * rows]})


@pytest.fixture
def folder(tmp_path):
    for step in (1, 2, 3):
        write(
            tmp_path / "rollouts", Recording(step, [generation(step), generation(step + 10)], {"weights": f"w{step}"})
        )
    return tmp_path


def ask(replay, step=1, number=1, prompts=PROMPTS, tokens=TOKENS, samples=SAMPLES):
    return replay.generation(step, number, prompts, tokens, samples)


def assert_same(found: Generation, expected: Generation):
    assert list(found.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name
    assert (found.prompts, found.tokens, found.columns) == (expected.prompts, expected.tokens, expected.columns)


def test_a_replay_gives_bitwise_what_was_recorded(folder):
    replay = Replay(folder, steps=3)
    for step in (1, 2, 3):
        assert_same(ask(replay, step, 1), generation(step))
        assert_same(ask(replay, step, 2), generation(step + 10))
        assert replay.recording.facts == {"weights": f"w{step}"}


def test_tensors_that_others_do_not_determine_are_kept(tmp_path):
    odd = generation()
    odd.tensors["position_ids"] = odd.tensors["position_ids"] + 5
    odd.tensors["input_ids"][0, 0] += 1
    odd.tensors["attention_mask"][0, 0] = 300  # beyond one byte
    odd.tensors["extra"] = torch.tensor([[-1], [2**40], [0], [0], [0], [0]])
    write(tmp_path, Recording(1, [odd]))
    assert_same(read(tmp_path, 1).generations[0], odd)


def test_a_file_holds_ten_bytes_a_token_and_no_pickle(folder):
    rows = 2 * SAMPLES * 2
    data = file_of(folder / "rollouts", 1).read_bytes()
    header = int.from_bytes(data[:8], "little")
    # prompts 4, responses 4 + mask 1 + log-probability 4, attention mask 1 byte a token
    assert len(data) - 8 - header == rows * (PROMPT * 5 + ANSWER * 10)
    assert json.loads(json.loads(data[8 : 8 + header])["__metadata__"]["atlasrl.rollout"])["step"] == 1


def test_a_step_recorded_again_after_a_resume_replaces_the_old_one(folder):
    write(folder / "rollouts", Recording(2, [generation(99)]))
    assert_same(ask(Replay(folder, 3), 2), generation(99))
    assert recorded_steps(folder / "rollouts") == [1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompts": ["3:aaaaaaaaaaaa", "0:cccccccccccc"]}, "prompt 1 is 0:cccccccccccc, recorded is 0:bbbbbbbbbbbb"),
        ({"prompts": PROMPTS[::-1], "tokens": TOKENS[::-1]}, "the same prompts in another order"),
        ({"samples": 4}, "2 prompts × 3 answers are recorded, 2 × 4 are asked for"),
        ({"prompts": PROMPTS[:1], "tokens": TOKENS[:1]}, "2 prompts × 3 answers are recorded, 1 × 3 are asked for"),
        ({"tokens": [TOKENS[0], tokens_digest([7, 8, 1])]}, "prompt 1 (0:bbbbbbbbbbbb) is the same text but has other"),
        ({"number": 3}, "only 2 recorded, but dynamic sampling asks for another"),
    ],
)
def test_anything_else_than_what_was_recorded_is_refused_in_one_line(folder, asked, words):
    with pytest.raises(Fault) as refused:
        ask(Replay(folder, 3), **asked)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert "step 1, generation" in str(refused.value)


def test_a_run_longer_than_its_recording_is_refused_before_its_first_step(folder):
    with pytest.raises(Fault, match=r"lacks step 4 \(2 of steps 1 to 5 are missing\); set steps to at most 3"):
        ask(Replay(folder, 5))


def test_a_folder_without_recordings_says_how_to_make_them(tmp_path):
    with pytest.raises(Fault, match=r"rollout\.record: true"):
        Replay(tmp_path, 1)


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"\x80\x04N." + d])
def test_a_damaged_recording_is_named(folder, damage):
    path = file_of(folder / "rollouts", 2)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Fault, match=r"step_000002\.safetensors is no recorded rollout"):
        ask(Replay(folder, 3), 2)


def test_another_safetensors_file_is_no_recording(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, file_of(tmp_path, 1))
    with pytest.raises(Fault, match="no recorded rollout"):
        ask(Replay(tmp_path, 1))
