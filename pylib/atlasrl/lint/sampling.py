"""Rules about DAPO's own numbers."""

from __future__ import annotations

from atlasrl.lint.case import Case
from atlasrl.lint.rule import rule

DAPO = "DAPO, arXiv 2503.14476"


@rule(
    "overlong-buffer",
    "error",
    reason="the punished zone reaches below length 0: every answer is punished, and shorter means better",
    source=f"{DAPO}, section 3.4; verl recipe/dapo (4096 of 20480)",
    remedy="make dapo.overlong.buffer_tokens a fraction of data.max_response_tokens, a fifth in the paper",
)
def overlong_buffer(case: Case):
    overlong, longest = case.recipe.dapo.overlong, case.recipe.data.max_response_tokens
    if overlong and overlong.buffer_tokens >= longest:
        yield f"dapo.overlong.buffer_tokens {overlong.buffer_tokens} of {longest} response tokens"


@rule(
    "generation-budget",
    "error",
    reason="a step can never collect its prompts, and the run stops at the first one",
    source="verl recipe/dapo/dapo_ray_trainer.py (max_num_gen_batches)",
    remedy="raise dapo.max_gen_batches or dapo.gen_batch_size",
)
def generation_budget(case: Case):
    dapo = case.recipe.dapo
    generated = dapo.max_gen_batches * (dapo.gen_batch_size or dapo.train_batch_size)
    if dapo.dynamic_sampling and generated < dapo.train_batch_size:
        yield f"{dapo.max_gen_batches} generations give {generated} prompts, a step needs {dapo.train_batch_size}"


@rule(
    "thin-generation-budget",
    "warning",
    reason="early and late in a run most groups are all wrong or all right and are dropped; the run stops",
    source=f"{DAPO}, section 3.2 and verl recipe/dapo (gen_batch_size 3 x train_batch_size, 10 generations)",
    remedy="raise dapo.max_gen_batches to 10, or set dapo.when_exhausted: fill",
)
def thin_generation_budget(case: Case):
    dapo = case.recipe.dapo
    times = dapo.max_gen_batches * (dapo.gen_batch_size or dapo.train_batch_size) / dapo.train_batch_size
    if dapo.dynamic_sampling and dapo.when_exhausted == "stop" and 1 <= times < 3:
        yield f"a step stops when {1 - 1 / times:.0%} of {times:g} x train_batch_size prompts are dropped"


@rule(
    "one-answer",
    "error",
    reason="the advantage is relative to the group: one answer alone has none",
    source=f"{DAPO}, section 2.3; verl v0.7.0 core_algos.py compute_grpo_outcome_advantage",
    remedy="set rollout.samples to 16",
)
def one_answer(case: Case):
    if case.recipe.rollout.samples == 1:
        yield "rollout.samples is 1"


@rule(
    "clip-lower",
    "warning",
    reason="clip-higher is meant to give rare tokens room: the upper bound is the wider one",
    source=f"{DAPO}, section 3.1 (0.2 and 0.28)",
    remedy="swap dapo.clip_low and dapo.clip_high",
)
def clip_lower(case: Case):
    if case.recipe.dapo.clip_high < case.recipe.dapo.clip_low:
        yield f"dapo.clip_high {case.recipe.dapo.clip_high} is below dapo.clip_low {case.recipe.dapo.clip_low}"


@rule(
    "stale-policy",
    "warning",
    reason="the last updates of a step learn from answers of a policy that is many updates old",
    source=f"{DAPO}, section 4.1 (16 updates a step)",
    remedy="raise dapo.mini_batch_size",
)
def stale_policy(case: Case):
    dapo = case.recipe.dapo
    if (updates := dapo.train_batch_size // dapo.mini_batch_size) > 16:
        yield f"{updates} updates a step ({dapo.train_batch_size} / {dapo.mini_batch_size} prompts)"


@rule(
    "endless-warmup",
    "error",
    reason="the workers die by an assertion, lr_warmup_steps < lr_decay_steps, after they have loaded all weights",
    source="megatron-core 0.12.1 megatron/core/optimizer_param_scheduler.py; verl v0.7.0 decays over all steps",
    remedy="set optimizer.warmup_steps below steps; a trial of a few steps needs none",
)
def endless_warmup(case: Case):
    if case.recipe.backend == "megatron" and case.recipe.optimizer.warmup_steps >= case.recipe.steps:
        yield f"{case.recipe.optimizer.warmup_steps} warm-up steps of {case.recipe.steps}"


@rule(
    "long-warmup",
    "warning",
    reason="the run ends before the learning rate is reached",
    source="verl v0.7.0 workers/fsdp_workers.py (the schedule moves once a step)",
    remedy="lower optimizer.warmup_steps",
)
def long_warmup(case: Case):
    if case.recipe.backend == "fsdp2" and case.recipe.optimizer.warmup_steps >= case.recipe.steps:
        yield f"{case.recipe.optimizer.warmup_steps} warm-up steps of {case.recipe.steps}"


@rule(
    "cut-distribution",
    "warning",
    reason="answers come from a cut distribution, log-probabilities from the whole one: the ratio is biased",
    source="verl recipe/dapo (top_p 1.0); verl v0.7.0 workers/actor divides by temperature and knows no top_p",
    remedy="set rollout.top_p: 1.0",
)
def cut_distribution(case: Case):
    if case.recipe.rollout.top_p < 1:
        yield f"rollout.top_p is {case.recipe.rollout.top_p}"


@rule(
    "shuffled-comparison",
    "warning",
    reason="a baseline compares step by step only where both runs saw the same prompts",
    source="verl v0.7.0 recipe/dapo/run_dapo_qwen3_moe_30b_megatron_npu.sh (data.shuffle False)",
    remedy="set data.shuffle: false, here and for the baseline",
)
def shuffled_comparison(case: Case):
    guard = case.recipe.guard
    if guard and guard.baseline and case.recipe.data.shuffle:
        yield "data.shuffle is true and guard.baseline is set"


@rule(
    "cached-answers-shuffled",
    "error",
    reason="skip_rollout looks at no prompt: cached answers are scored against other questions",
    source="verl v0.7.0 verl/utils/rollout_skip.py",
    remedy="set data.shuffle: false",
)
def cached_answers_shuffled(case: Case):
    if case.setting("actor_rollout_ref.rollout.skip_rollout") and case.recipe.data.shuffle:
        yield "rollout.skip_rollout with data.shuffle"


@rule(
    "cached-answers-validated",
    "error",
    reason="validation is served from the same cache, with the answers of training prompts",
    source="verl e2d45b00e verl/utils/rollout_skip.py replaces generate_sequences for both",
    remedy="set validate_every: 0",
)
def cached_answers_validated(case: Case):
    if case.setting("actor_rollout_ref.rollout.skip_rollout") and case.recipe.validate_every:
        yield f"rollout.skip_rollout with validate_every {case.recipe.validate_every}"
