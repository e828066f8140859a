"""From a plan to a trainer that is ready to fit: environment, Ray, hydra config, verl's parts."""

from __future__ import annotations

import importlib.util
import inspect
import os
from importlib.metadata import version
from pathlib import Path

from atlasrl.errors import Fault
from atlasrl.precision import duplicates, effective
from atlasrl.recipe import Recipe
from atlasrl.rundir import AttemptDir
from atlasrl.stacks import DEFAULT
from atlasrl.trainer import patches
from atlasrl.trainer.override import Override
from atlasrl.trainer.overrides import CONFIG_NAME

PYLIB = Path(__file__).resolve().parents[2]

PLUGINS = "VERL_USE_EXTERNAL_MODULES"

MEMORY_FOLDER = "ATLASRL_MEMORY_FOLDER"
"""Environment: where every worker records its memory (recipe: probe.memory, on a CPU)."""

WATCH_SYNCS, WATCH_FOLDER = "ATLASRL_WATCH_SYNCS", "ATLASRL_WATCH_FOLDER"
"""Environment: how many weight syncs a worker records (recipe: probe.syncs), and where."""


def prepare_environment(plan: dict, recipe: Recipe, attempt: AttemptDir, first_step: int) -> None:
    """Environment of this process, before verl is imported."""
    from atlasrl.trainer.verl_patches import FIRST_STEP

    attempt.path.mkdir(parents=True, exist_ok=True)
    os.environ.update({**plan.get("environment", {}), **recipe.environment})
    given = [name for name in os.environ.get(PLUGINS, "").split(",") if name]
    os.environ[PLUGINS] = ",".join(dict.fromkeys([*given, *plugins(recipe)]))
    if recipe.probe.syncs:
        os.environ[PLUGINS] += ",atlasrl.trainer.sync_plugin"
        os.environ |= {WATCH_SYNCS: str(recipe.probe.syncs), WATCH_FOLDER: str(attempt.weights)}
    if probes_memory(recipe):
        attempt.workers.mkdir(exist_ok=True)
        os.environ[PLUGINS] += ",atlasrl.trainer.memory_probe"
        os.environ[MEMORY_FOLDER] = str(attempt.workers)
    os.environ.setdefault("TQDM_DISABLE", "1")  # a progress bar swallows the beginning of the next line of a log
    os.environ["TENSORBOARD_DIR"] = str(attempt.run.tensorboard)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(attempt.metrics)
    os.environ[FIRST_STEP] = str(first_step)


def plugins(recipe: Recipe) -> list[str]:
    """Modules that every verl process of this recipe loads, in this order."""
    on_cpu = recipe.device == "cpu"
    device = "atlasrl.trainer.cpu" if on_cpu else "atlasrl.trainer.plugin"
    megatron = "atlasrl.trainer.cpu.megatron" if on_cpu else "atlasrl.trainer.megatron_plugin"
    backend = "atlasrl.trainer.fsdp2_plugin" if recipe.backend == "fsdp2" else megatron
    return [device, backend, *(["atlasrl.trainer.deterministic_plugin"] if recipe.deterministic else [])]


def probes_memory(recipe: Recipe) -> bool:
    """Do workers record their memory? Only where it is the host's: an accelerator has a profiler."""
    return recipe.probe.memory and recipe.device == "cpu"


def connect(plan: dict, recipe: Recipe) -> None:
    """Connect to the cluster, or start a private one-node Ray when RAY_ADDRESS is not set.

    Raises:
        Fault: no cluster, or fewer devices than the plan needs.
    """
    import ray

    names = {*plan.get("environment", {}), *recipe.environment, PLUGINS, patches.WITHOUT, "OMP_NUM_THREADS"}
    names |= {WATCH_SYNCS, WATCH_FOLDER} if recipe.probe.syncs else set()
    names |= {MEMORY_FOLDER} if probes_memory(recipe) else set()
    environment = {name: os.environ[name] for name in sorted(names) if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PYLIB), os.environ.get("PYTHONPATH")]))
    needed = plan["nodes"] * plan["devices_per_node"]
    resource = "GPU" if recipe.device == "cuda" else "NPU"
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves a private cluster's workers on a busy machine
    # verl reserves three CPUs per worker (max_colocate_count) and needs some for its own helpers.
    private = {"num_cpus": 3 * needed + 4, "resources": {resource: needed}, "include_dashboard": False}
    try:
        ray.init(address=address or "local", runtime_env={"env_vars": environment}, **({} if address else private))
    except Exception as problem:  # Ray raises Exception itself when a daemon does not answer in time
        where = f"reach Ray at {address}" if address else "start Ray on this machine"
        text = " ".join(str(problem).split())
        raise Fault(
            f"cannot {where}: {text}; is the cluster of this attempt up, and the machine not overloaded?"
        ) from problem
    have = ray.cluster_resources().get(resource, 0)
    if have < needed:
        raise Fault(
            f"Ray offers {have:g} {resource}, the plan needs {plan['nodes']} nodes × {plan['devices_per_node']} = "
            f"{needed}: a node did not join"
        )


def compose(plan: dict, recipe: Recipe, resume_from: Path | None):
    """verl's configuration with the plan's overrides.

    Raises:
        Fault: hydra refuses an override; its first line is passed on.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    folder = Path(importlib.util.find_spec("verl").origin).parent / "trainer" / "config"
    settings = [Override(**item) for item in plan["overrides"]]
    if resume_from is not None:
        settings += [
            Override("trainer.resume_mode", "resume_path", "this attempt resumes"),
            Override("trainer.resume_from_path", str(resume_from), "this attempt resumes"),
            Override("trainer.val_before_train", False, "that step was validated by an earlier attempt"),
        ]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return compose(CONFIG_NAME[recipe.backend], overrides=[str(setting) for setting in settings])
    except (HydraException, OmegaConfBaseException) as problem:
        text = " ".join(str(problem).split())
        raise Fault(f"verl's configuration: {text}; check the recipe's `verl:` keys (a new key needs ++)") from None


def require_known_trainer(theirs: type) -> None:
    """Scores are given to verl's trainer as a function, as 0.7.0 takes them; 0.7.1 asks reward-loop workers instead.

    Raises:
        Fault: verl's RayPPOTrainer has another signature than that of 0.7.0.
    """
    missing = {"reward_fn", "val_reward_fn"} - inspect.signature(theirs.__init__).parameters.keys()
    if missing:
        raise Fault(
            f"verl {version('verl')}: RayPPOTrainer takes no {' and no '.join(sorted(missing))}; this trainer is "
            f"written for verl 0.7.0: train with the stack {DEFAULT['npu']}"
        )


def build_trainer(plan: dict, recipe: Recipe, attempt: AttemptDir, resume_from: Path | None):
    """verl's trainer with its workers' classes, reward function and datasets. Starts no worker yet."""
    from omegaconf import OmegaConf
    from verl.trainer.main_ppo import TaskRunner, create_rl_dataset
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils import hf_tokenizer
    from verl.utils.config import validate_config
    from verl.utils.dataset.rl_dataset import collate_fn

    from atlasrl.trainer.dapo_trainer import DapoTrainer
    from atlasrl.trainer.offline import StubScorer
    from atlasrl.trainer.scoring import Scorer

    require_known_trainer(RayPPOTrainer)
    config = compose(plan, recipe, resume_from)
    OmegaConf.resolve(config)
    if recipe.data.deduplicate:
        config.data.train_files = duplicates.removed(list(config.data.train_files), attempt.run)
    effective.record(attempt, OmegaConf.to_container(config), plan["recipe"])
    for outcome in patches.outcomes():
        if outcome.state in {"switched off", "does not apply"}:
            print(f"warning: fix {outcome.id} is {outcome.state}: {outcome.detail}", flush=True)
    parts = TaskRunner()
    _, worker_group = parts.add_actor_rollout_worker(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path, trust_remote_code=config.data.trust_remote_code)
    manager = load_reward_manager(config, tokenizer, num_examine=0, **config.reward_model.get("reward_kwargs", {}))
    files = config.data.val_files
    return DapoTrainer(
        recipe=recipe,
        attempt=attempt,
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping=parts.role_worker_mapping,
        resource_pool_manager=parts.init_resource_pool_mgr(config),
        ray_worker_group_cls=worker_group,
        reward_fn=StubScorer() if recipe.rollout.stub else Scorer(manager),
        val_reward_fn=Scorer(manager) if files else None,
        train_dataset=create_rl_dataset(config.data.train_files, config.data, tokenizer, None),
        val_dataset=create_rl_dataset(files, config.data, tokenizer, None, is_train=False) if files else None,
        collate_fn=collate_fn,
    )
