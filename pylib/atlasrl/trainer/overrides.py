"""From a recipe to verl's settings. Pure: imports no verl, reads no file, asks no machine.

Every setting carries its reason. What the recipe says under `verl:` comes last and wins.
"""

from __future__ import annotations

from pathlib import Path

from atlasrl.errors import UsageFault
from atlasrl.recipe import Recipe, Rollout
from atlasrl.rundir import RunDir
from atlasrl.trainer.megatron_overrides import megatron_overrides
from atlasrl.trainer.override import Override

CONFIG_NAME = {"fsdp2": "ppo_trainer", "megatron": "ppo_megatron_trainer"}
"""verl's top-level YAML of each backend."""

CPU_ROLLOUTS = "atlasrl.trainer.cpu.manager.BatchRollouts"
NO_ENGINE = "atlasrl.trainer.offline.NoEngine"

HCCL_CLOCK = "as HCCL_EXEC_TIMEOUT: the shorter of both clocks would end the job and name the wrong cause"

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL_LENGTH = f"++{ROLLOUT}.engine_kwargs.vllm.max_model_len"


def verl_overrides(
    recipe: Recipe,
    *,
    nodes: int,
    devices_per_node: int,
    model: Path | str,
    train: Path | str,
    val: Path | str | None,
    run: RunDir,
) -> list[Override]:
    """All settings of a run, in the order in which hydra applies them.

    Raises:
        UsageFault: batch sizes that do not divide among the workers, or settings the backend does not have.
    """
    world = nodes * devices_per_node
    replicas = data_parallel(recipe, world)
    check_batches(recipe, replicas)
    backend = _fsdp2(recipe) if recipe.backend == "fsdp2" else megatron_overrides(recipe, world=world)
    return [
        *_data(recipe, train, val),
        *_model(recipe, model),
        *_actor(recipe),
        *backend,
        *_rollout(recipe, world),
        *_reward(recipe),
        *_trainer(recipe, nodes, devices_per_node, val, run),
        *(Override(key, value, "recipe: verl") for key, value in recipe.verl.items()),
    ]


def data_parallel(recipe: Recipe, world: int) -> int:
    """How many model replicas train side by side."""
    if recipe.backend == "fsdp2":
        return world
    parallel = recipe.parallel
    return max(1, world // (parallel.tensor * parallel.pipeline * parallel.context))


def check_batches(recipe: Recipe, replicas: int) -> None:
    """Refuse batch sizes that verl would refuse much later, or with an assertion.

    Raises:
        UsageFault: with the arithmetic and the nearest sizes that work.
    """
    dapo, samples = recipe.dapo, recipe.rollout.samples
    longest = recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
    if dapo.tokens_per_device is not None and dapo.tokens_per_device * recipe.parallel.context < longest:
        raise UsageFault(
            f"dapo.tokens_per_device {dapo.tokens_per_device} is less than one answer: data.max_prompt_tokens + "
            f"data.max_response_tokens = {longest}"
        )
    if dapo.train_batch_size % dapo.mini_batch_size:
        raise UsageFault(
            f"dapo.train_batch_size {dapo.train_batch_size} is not a multiple of dapo.mini_batch_size "
            f"{dapo.mini_batch_size}; a step is a whole number of optimizer steps"
        )
    answers = dapo.mini_batch_size * samples
    rows = 1 if dapo.tokens_per_device else dapo.micro_batch_size
    if answers % (replicas * rows):
        fitting = [m for m in range(1, answers + 1) if answers % (replicas * m) == 0]
        advice = (
            f"dapo.micro_batch_size can be {', '.join(map(str, fitting[-6:]))}"
            if fitting
            else f"make dapo.mini_batch_size × rollout.samples a multiple of {replicas}"
        )
        raise UsageFault(
            f"{dapo.mini_batch_size} prompts × {samples} samples = {answers} answers per optimizer step do not divide "
            f"into {replicas} worker(s) × dapo.micro_batch_size {rows}; {advice}"
        )


def _data(recipe: Recipe, train: Path | str, val: Path | str | None) -> list[Override]:
    data = recipe.data
    return [
        Override("data.train_files", [str(train)], "plan: training prompts"),
        Override("data.val_files", [str(val)] if val else None, "plan: validation prompts"),
        Override("data.train_batch_size", recipe.dapo.train_batch_size, "recipe: dapo.train_batch_size"),
        Override("data.max_prompt_length", data.max_prompt_tokens, "recipe: data.max_prompt_tokens"),
        Override("data.max_response_length", data.max_response_tokens, "recipe: data.max_response_tokens"),
        Override("data.shuffle", data.shuffle, "recipe: data.shuffle"),
        Override("data.seed", recipe.seed, "recipe: seed"),
        Override("data.trust_remote_code", recipe.model.trust_remote_code, "recipe: model.trust_remote_code"),
        Override("data.filter_overlong_prompts", True, "a prompt longer than the limit would end the run"),
        Override("data.filter_overlong_prompts_workers", None, "no process pool for a tokenizer pass"),
        Override("data.dataloader_num_workers", 0, "rows are read by the trainer itself, in a resumable order"),
    ]


def _model(recipe: Recipe, model: Path | str) -> list[Override]:
    on_cpu = recipe.device == "cpu"
    settings = [
        Override(f"{MODEL}.path", str(model), "plan: checkpoint to start from"),
        Override(f"{MODEL}.trust_remote_code", recipe.model.trust_remote_code, "recipe: model.trust_remote_code"),
        Override(
            f"{MODEL}.enable_gradient_checkpointing",
            recipe.parallel.recompute != "none",
            "recipe: parallel.recompute",
        ),
        Override(f"{MODEL}.use_remove_padding", not on_cpu, "packing needs a fused attention kernel, absent on a CPU"),
    ]
    if on_cpu:
        settings.append(
            Override(f"++{MODEL}.override_config.attn_implementation", "sdpa", "flash-attn, the default, is CUDA only")
        )
    return settings


def _actor(recipe: Recipe) -> list[Override]:
    dapo = recipe.dapo
    compiles = recipe.device == "cuda"
    packing = [
        Override(f"{ACTOR}.use_dynamic_bsz", True, "recipe: dapo.tokens_per_device"),
        Override(f"{ACTOR}.ppo_max_token_len_per_gpu", dapo.tokens_per_device, "recipe: dapo.tokens_per_device"),
    ]
    return [
        *(packing if dapo.tokens_per_device else []),
        Override(f"{ACTOR}.ppo_mini_batch_size", dapo.mini_batch_size, "recipe: dapo.mini_batch_size"),
        Override(f"{ACTOR}.ppo_micro_batch_size_per_gpu", dapo.micro_batch_size, "recipe: dapo.micro_batch_size"),
        Override(f"{ACTOR}.clip_ratio_low", dapo.clip_low, "recipe: dapo.clip_low"),
        Override(f"{ACTOR}.clip_ratio_high", dapo.clip_high, "recipe: dapo.clip_high (clip-higher)"),
        Override(f"{ACTOR}.clip_ratio_c", 10.0, "DAPO: dual clip far out, as in verl's DAPO scripts"),
        Override(f"{ACTOR}.loss_agg_mode", "token-mean", "DAPO: token-level loss"),
        Override(f"{ACTOR}.use_kl_loss", False, "DAPO: no KL term"),
        Override(f"{ACTOR}.entropy_coeff", 0, "DAPO: no entropy bonus"),
        Override(f"{ACTOR}.use_torch_compile", compiles, "compiling pays on CUDA only"),
        Override(f"{ACTOR}.optim.lr", recipe.optimizer.learning_rate, "recipe: optimizer.learning_rate"),
        Override(f"{ACTOR}.optim.lr_warmup_steps", recipe.optimizer.warmup_steps, "recipe: optimizer.warmup_steps"),
        Override(f"{ACTOR}.optim.weight_decay", recipe.optimizer.weight_decay, "recipe: optimizer.weight_decay"),
        Override("algorithm.adv_estimator", "grpo", "DAPO: advantage relative to the group, no critic"),
        Override("algorithm.use_kl_in_reward", False, "DAPO: no KL term"),
        Override("critic.enable", False, "no critic"),
    ]


def _fsdp2(recipe: Recipe) -> list[Override]:
    if recipe.parallel.recompute == "selective":
        raise UsageFault("parallel.recompute: selective is Megatron's; the fsdp2 backend knows none and full")
    engine = f"{ACTOR}.fsdp_config"
    offload = recipe.parallel.offload
    return [
        Override(f"{ACTOR}.strategy", "fsdp2", "recipe: backend"),
        Override(f"{ACTOR}.grad_clip", recipe.optimizer.clip_grad, "recipe: optimizer.clip_grad"),
        Override(f"{engine}.dtype", recipe.model.compute_dtype, "recipe: model.compute_dtype"),
        Override(f"{engine}.param_offload", offload, "recipe: parallel.offload"),
        Override(f"{engine}.optimizer_offload", offload, "recipe: parallel.offload"),
        Override(f"{engine}.use_torch_compile", recipe.device == "cuda", "compiling pays on CUDA only"),
        Override("critic.strategy", "fsdp2", "unused, but verl checks it"),
    ]


def _rollout(recipe: Recipe, world: int) -> list[Override]:
    rollout = recipe.rollout
    on_cpu = rollout.engine == "cpu"
    # Without a gradient the forward pass keeps no activations, so that four times the rows fit.
    log_prob_rows = recipe.dapo.micro_batch_size * (4 if on_cpu else 1)
    engine = Override(f"{ROLLOUT}.name", rollout.engine, "recipe: rollout.engine")
    if rollout.offline:
        engine = Override(f"{ROLLOUT}.name", "none", "recipe: rollout.replay or rollout.stub; nothing is generated")
    settings = [
        engine,
        Override(f"{ROLLOUT}.n", rollout.samples, "recipe: rollout.samples"),
        Override(f"{ROLLOUT}.temperature", rollout.temperature, "recipe: rollout.temperature"),
        Override(f"{ROLLOUT}.top_p", rollout.top_p, "recipe: rollout.top_p"),
        Override(f"{ROLLOUT}.dtype", recipe.model.compute_dtype, "recipe: model.compute_dtype"),
        Override(f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor, "recipe: rollout.tensor"),
        Override(f"{ROLLOUT}.gpu_memory_utilization", rollout.memory_fraction, "recipe: rollout.memory_fraction"),
        Override(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", log_prob_rows, "rows per forward pass"),
        Override(f"{ROLLOUT}.calculate_log_probs", True, "rollout and actor log-probabilities are compared every step"),
    ]
    if rollout.expert > 1:
        settings += [
            Override(f"{ROLLOUT}.expert_parallel_size", rollout.expert, "recipe: rollout.expert"),
            Override(
                f"{ROLLOUT}.data_parallel_size",
                max(1, rollout.expert // rollout.tensor),
                "verl: expert = tensor × data parallel",
            ),
        ]
    if rollout.offline:
        settings += [
            Override(f"{ROLLOUT}.agent.num_workers", 1, "no agent-loop actors: nothing is generated"),
            Override(f"++{ROLLOUT}.agent.agent_loop_manager_class", NO_ENGINE, "answers come from the trainer"),
        ]
    elif on_cpu:
        settings += [
            Override(f"{ROLLOUT}.load_format", "auto", "weights come from the actor before the first answer"),
            Override(f"{ROLLOUT}.agent.num_workers", 1, "no agent-loop actors: whole batches are generated"),
            Override(
                f"++{ROLLOUT}.agent.agent_loop_manager_class",
                CPU_ROLLOUTS,
                "verl's agent loop costs about 20 ms of CPU per answer",
            ),
        ]
    else:
        longest = recipe.data.max_prompt_tokens + recipe.data.max_response_tokens
        settings.append(Override(MODEL_LENGTH, longest, "longest prompt + answer, not the model's own limit"))
        settings += npu_engine(rollout) if recipe.device == "npu" else []
    return settings


def npu_engine(rollout: Rollout) -> list[Override]:
    """Graph mode and prefill of vllm-ascend; its own options are `additional_config` of the engine."""
    option, asked = f"++{ROLLOUT}.engine_kwargs.vllm.additional_config", "recipe: rollout.graph"
    settings = []
    if rollout.graph == "none":
        settings.append(Override(f"{ROLLOUT}.enforce_eager", True, "graph capture of vllm-ascend needs extra memory"))
    else:
        settings.append(Override(f"{ROLLOUT}.enforce_eager", False, asked))
    if rollout.graph == "torchair":
        settings += [
            Override(f"{option}.torchair_graph_config.enabled", True, asked),
            Override(f"{option}.ascend_scheduler_config.enabled", True, "torchair graphs cannot chunk their prefill"),
            Override(f"{option}.refresh", True, "the graph must take the weights of each sync"),
        ]
    if rollout.chunked_prefill:
        settings.append(Override(f"{option}.chunked_prefill_for_mla", True, "recipe: rollout.chunked_prefill"))
    return settings


def _reward(recipe: Recipe) -> list[Override]:
    overlong = recipe.dapo.overlong
    shaping = {
        "enable": overlong is not None,
        "len": overlong.buffer_tokens if overlong else 1,
        "penalty_factor": overlong.penalty if overlong else 0.0,
        "log": overlong is not None,
    }
    settings = [
        Override("reward_model.enable", False, "rewards come from a rule"),
        # verl's DAPO recipe sets reward_model.overlong_buffer, its reward loop (on by default in 0.7.0) reads
        # reward_model.reward_kwargs: no penalty, no error. Both places and both managers are set here.
        Override("reward_model.use_reward_loop", False, "answers are scored by the trainer, with overlong shaping"),
        Override("reward_model.reward_manager", "dapo", "the reward loop, if someone turns it on, shapes as well"),
        Override("reward_manager.name", "dapo", "verl's reward manager with overlong shaping"),
        Override("++reward_model.reward_kwargs.overlong_buffer_cfg", shaping, "recipe: dapo.overlong"),
        Override(
            "++reward_model.reward_kwargs.max_resp_len", recipe.data.max_response_tokens, "overlong shaping needs it"
        ),
    ]
    if recipe.data.reward:
        settings.append(Override("custom_reward_function.path", str(recipe.data.reward), "recipe: data.reward"))
    return settings


def _trainer(recipe: Recipe, nodes: int, devices_per_node: int, val: Path | str | None, run: RunDir) -> list[Override]:
    validates = bool(val) and recipe.validate_every > 0 and not recipe.rollout.offline  # no engine would answer
    on_cpu = recipe.device == "cpu"
    device = "npu" if on_cpu else recipe.device
    return [
        Override("trainer.nnodes", nodes, "plan: nodes"),
        Override("trainer.n_gpus_per_node", devices_per_node, "plan: devices per node"),
        *([Override("actor_rollout_ref.nccl_timeout", 7200, HCCL_CLOCK)] if device == "npu" and not on_cpu else []),
        Override("trainer.device", device, "the Ray resource that a worker holds; a CPU emulates NPUs"),
        Override("trainer.project_name", "atlasrl", "label of console and TensorBoard lines"),
        Override("trainer.experiment_name", run.name, "run name"),
        Override("trainer.logger", ["console", "tensorboard", "file"], "people, curves, machines"),
        Override("trainer.total_training_steps", recipe.steps, "recipe: steps"),
        Override("trainer.total_epochs", 1, "prompts are drawn endlessly; steps decide the end"),
        Override("trainer.val_before_train", validates, "a first point for the validation curve"),
        Override("trainer.test_freq", recipe.validate_every if validates else -1, "recipe: validate_every"),
        Override("trainer.save_freq", recipe.checkpoint.save_every, "recipe: checkpoint.save_every"),
        Override("trainer.default_local_dir", str(run.checkpoints), "run directory"),
        Override("trainer.resume_mode", "disable", "the attempt says what to resume, never verl's tracker"),
        Override("trainer.balance_batch", True, "workers get equal numbers of tokens"),
    ]
