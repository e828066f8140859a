"""The CPU's answers against transformers' own forward pass and generate()."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.verl

torch = pytest.importorskip("torch")

from atlasrl.errors import Fault  # noqa: E402
from atlasrl.trainer.cpu import generate as cpu  # noqa: E402
from atlasrl.trainer.cpu.attention import ATTENTION  # noqa: E402
from atlasrl.trainer.cpu.generate import Decoding, generate, nucleus, pick, uniforms  # noqa: E402

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [9, 10, 11, 12, 13, 9], [8], [5, 6, 7]]
SEEDS = [11, 12, 13, 14, 15, 16]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.5,
        attn_implementation=ATTENTION,
    )
    return LlamaForCausalLM(config).eval()


def deepseek():
    from trainer_assets import untrained_model

    model = untrained_model(experts=4).eval()
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.fixture(params=[llama, deepseek], ids=["grouped-query", "latent"], scope="module")
def model(request):
    return request.param()


def decoding(**changes):
    return Decoding(
        **{"max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "stop": frozenset({2}), "pad": 0, **changes}
    )


@torch.inference_mode()
def reference_log_probs(model, prompt, tokens, temperature=1.0):
    """Teacher forcing, one sequence, no cache, no padding, eager attention."""
    model.set_attn_implementation("eager")
    try:
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float() / temperature
    finally:
        model.set_attn_implementation(ATTENTION)
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)


def test_log_probs_are_those_of_a_plain_forward_pass(model):
    """Through left padding, prompt sharing, the preallocated cache and rows leaving the batch."""
    answers = generate(model, PROMPTS, SEEDS, decoding(temperature=0.7, stop=frozenset(range(2, 8))))
    lengths = {len(a.tokens) for a in answers}
    assert len(lengths) > 1, "no row ended early: the test would not see the batch shrink"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference_log_probs(model, prompt, answer.tokens, 0.7)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=2e-5, rtol=0)


def test_greedy_answers_are_those_of_transformers_generate(model):
    answers = generate(model, PROMPTS, SEEDS, decoding(temperature=0.0))
    model.set_attn_implementation("eager")
    try:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = torch.tensor([prompt])
            reference = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=12,
                eos_token_id=2,
                pad_token_id=0,
            )
            assert answer.tokens == reference[0, len(prompt) :].tolist()
    finally:
        model.set_attn_implementation(ATTENTION)


def test_an_answer_depends_on_its_own_prompt_and_seed_only(model):
    together = generate(model, PROMPTS, SEEDS, decoding())
    for row in range(len(PROMPTS)):
        (alone,) = generate(model, [PROMPTS[row]], [SEEDS[row]], decoding())
        assert alone.tokens == together[row].tokens
    assert together[0].tokens != together[1].tokens, "two seeds, one answer"


def test_chunks_give_the_same_answers_as_one_batch(model, monkeypatch):
    together = generate(model, PROMPTS, SEEDS, decoding())
    monkeypatch.setattr(cpu, "CACHE_BYTES", 1)
    assert cpu.rows_at_a_time(model, 18) == 1
    assert [a.tokens for a in generate(model, PROMPTS, SEEDS, decoding())] == [a.tokens for a in together]


def test_a_repetition_is_bitwise_equal(model):
    assert generate(model, PROMPTS, SEEDS, decoding()) == generate(model, PROMPTS, SEEDS, decoding())


def test_answers_end_at_the_stop_token_or_the_limit(model):
    for answer in generate(model, PROMPTS, SEEDS, decoding(stop=frozenset(range(2, 12)))):
        assert all(token not in range(2, 12) for token in answer.tokens[:-1])
        assert answer.tokens[-1] in range(2, 12) or len(answer.tokens) == 12
        assert len(answer.tokens) == len(answer.log_probs) <= 12


def test_no_prompts_no_answers(model):
    assert generate(model, [], [], decoding()) == []


# -- drawing ----------------------------------------------------------------------------------------


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).repeat(40_000, 1)
    draws, log_probs = pick(logits, torch.rand(40_000, dtype=torch.float64), decoding())
    shares = torch.bincount(draws, minlength=4) / 40_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.01, rtol=0)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.5, 0.0, 0.3, 0.2])[draws])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_an_impossible_token_is_never_drawn_at_the_edges(uniform):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    token, _ = pick(logits, torch.tensor([uniform], dtype=torch.float64), decoding())
    assert token.item() in {1, 3}


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p():
    probabilities = torch.tensor([[0.1, 0.5, 0.25, 0.15]])
    assert (nucleus(probabilities.clone(), 0.5) > 0).tolist() == [[False, True, False, False]]
    assert (nucleus(probabilities.clone(), 0.6) > 0).tolist() == [[False, True, True, False]]
    assert (nucleus(probabilities.clone(), 0.01) > 0).sum() == 1


def test_a_row_s_numbers_do_not_depend_on_the_other_rows():
    assert torch.equal(uniforms([3, 4], 5)[1], uniforms([4], 5)[0])
    assert not torch.equal(uniforms([3, 4], 5)[0], uniforms([3, 4], 5)[1])


# -- weights ----------------------------------------------------------------------------------------


def twin(model):
    import copy

    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


def copy_weights(*arguments):
    from atlasrl.trainer.cpu.rollout import copy_weights

    return copy_weights(*arguments)


def test_synchronised_weights_give_the_same_digests_everywhere(model):
    from atlasrl.trainer.cpu.manager import agree

    sent = list(model.state_dict().items())
    first = copy_weights(twin(model), sent, "worker 0")
    assert agree([first, copy_weights(twin(model), sent, "worker 1")])
    changed = [(n, t + 1 if n == "model.norm.weight" else t) for n, t in sent]
    with pytest.raises(Fault, match=r"tensor model.norm.weight of worker 1 differs"):
        agree([first, copy_weights(twin(model), changed, "worker 1")])


def test_a_tensor_that_was_not_sent_is_named(model):
    sent = [(n, t) for n, t in model.state_dict().items() if n != "model.norm.weight"]
    with pytest.raises(Fault, match=r"worker 3: the actor never sent model.norm.weight"):
        copy_weights(twin(model), sent, "worker 3")


def test_a_tensor_that_the_rollout_lacks_is_named(model):
    with pytest.raises(Fault, match=r"has a tensor extra\.weight"):
        copy_weights(twin(model), [("extra.weight", torch.zeros(1))], "worker 0")


def test_a_tensor_overwritten_by_a_later_one_is_found():
    """Tied memory with two different contents: the last copy wins, silently, without the second look."""
    model = llama()
    sent = dict(model.state_dict())
    sent["lm_head.weight"] = sent["lm_head.weight"] + 1
    with pytest.raises(Fault, match=r"worker 0: tensor model.embed_tokens.weight of the rollout differs"):
        copy_weights(twin(model), list(sent.items()), "worker 0")


def test_weights_are_compared_in_the_rollout_s_own_precision(model):
    other = twin(model).bfloat16()
    assert copy_weights(other, list(model.state_dict().items()), "worker 0")
