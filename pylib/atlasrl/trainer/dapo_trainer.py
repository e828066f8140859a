"""verl's RayPPOTrainer for a run of ours: dynamic sampling, sealed checkpoints, records. `fit` is verl's own."""

from __future__ import annotations

import json

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn

from atlasrl import determinism
from atlasrl.errors import Fault
from atlasrl.outcome import STOPPED
from atlasrl.recipe import Recipe
from atlasrl.rundir import AttemptDir
from atlasrl.trainer import offline, records, saving
from atlasrl.trainer.dapo import Collector, Groups, GroupSource, Sampling, StepGroups, StoredRollouts, Trend
from atlasrl.trainer.prompts import Prompt, PromptSource, files_digest
from atlasrl.trainer.scoring import accuracies
from atlasrl.trainer.watchman import Watchman


class Stopped(Fault):
    """Someone asked the attempt to end; it ended between two steps."""

    exit_code = STOPPED


class DapoTrainer(RayPPOTrainer):
    """Args beyond verl's: the recipe and the attempt that this process is."""

    def __init__(self, *, recipe: Recipe, attempt: AttemptDir, **verl_arguments):
        self.recipe, self.attempt = recipe, attempt
        self.sampling = Sampling.of(recipe)
        self.trend = Trend(recipe.dapo.max_gen_batches)
        self.watchman = Watchman(recipe.guard, attempt) if recipe.guard else None
        self.global_steps = self.saved_step = 0
        self.step_record: dict = {}
        self.step_metrics: dict[str, float] = {}
        self.step_timing: dict[str, float] = {}
        self.extra_names: list[str] = []
        super().__init__(**verl_arguments)

    # -- what verl calls ----------------------------------------------------------------------------

    def _create_dataloader(self, train_dataset, val_dataset, collate_fn, train_sampler):
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.total_training_steps = self.recipe.steps
        self.config.actor_rollout_ref.actor.optim.total_training_steps = self.recipe.steps
        prompts = PromptSource(
            train_dataset,
            digest=files_digest(list(self.config.data.train_files)),
            seed=self.recipe.seed,
            shuffle=self.recipe.data.shuffle,
        )
        collector = Collector(self.sampling, prompts, self._generate, self._outcomes, _join)
        self.train_dataloader = GroupSource(self.recipe.steps, self._next_step, collector, self._deliver)
        self.val_dataloader = [collate_fn([val_dataset[i] for i in range(len(val_dataset))])] if val_dataset else []

    def init_workers(self):
        super().init_workers()
        if self.recipe.deterministic:
            self._prove_deterministic()
        manager = offline.instead_of(self.async_rollout_manager, self.recipe, self.config, self.tokenizer)
        self.async_rollout_manager = StoredRollouts(manager)
        self.recorder = offline.Recorder(self.attempt.run) if self.recipe.rollout.record else None

    def _prove_deterministic(self) -> None:
        """Raises Fault when a worker or a rollout server is not set up as the recipe's `deterministic` asks."""
        actors = {f"worker {rank}": worker for rank, worker in enumerate(self.actor_rollout_wg.workers)}
        for number, replica in enumerate(getattr(self.async_rollout_manager, "rollout_replicas", ())):
            actors |= {f"rollout server {number}.{rank}": server for rank, server in enumerate(replica.servers)}
        determinism.prove(self.recipe.device, actors)
        self.attempt.run.record("deterministic", attempt=self.attempt.number, processes=1 + len(actors))

    def _update_actor(self, batch: DataProto) -> DataProto:
        filled = torch.from_numpy(batch.non_tensor_batch["filled"].astype(bool))
        batch.batch["advantages"][filled] = 0
        output = super()._update_actor(batch)
        self._weights_changed()
        gap = records.log_prob_gap(batch)
        if gap is not None:
            self.step_metrics["training/rollout_actor_log_prob_gap"] = gap
        self._warn(records.log_prob_alarm(self.global_steps, gap, self.recipe.model.compute_dtype))
        records.append(self.attempt.samples, self.step_record)
        output.meta_info["metrics"].update(self.step_metrics)
        return output

    def _save_checkpoint(self):
        step = self.global_steps
        saving.save(
            self.attempt.run,
            self.recipe,
            step=step,
            world_size=self.actor_rollout_wg.world_size,
            prompts=self.train_dataloader.state_dict(),
            write=super()._save_checkpoint,
        )
        self.saved_step = step

    def _load_checkpoint(self):
        super()._load_checkpoint()
        self.saved_step = self.global_steps
        self._weights_changed()
        if self.global_steps:
            print(f"resumed after step {self.global_steps} of {self.recipe.steps}", flush=True)

    def _dump_generations(self, inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path):
        """As verl's, but what the reward function reports cannot overwrite the score that was trained on."""
        extras = {("reported_score" if k == "score" else k): v for k, v in reward_extra_infos_dict.items()}
        super()._dump_generations(inputs, outputs, gts, scores, extras, dump_path)

    # -- a training step's groups -------------------------------------------------------------------

    def _next_step(self) -> int:
        """The step about to start.

        Raises:
            Stopped: a stop request lies in the attempt's folder.
            Fault: the guard ends the run.
        """
        step = self.global_steps
        self.judge(step - 1)
        if self.attempt.stop_request.exists() and step <= self.recipe.steps:
            self._stop(step - 1)
        return step

    def judge(self, done: int) -> None:
        """Let the recipe's guard look at the curves up to step `done`.

        Raises:
            Fault: a check started to fail and the guard's action is `stop`; a checkpoint was written before.
        """
        failed = self.watchman.look(done) if self.watchman else None
        if failed:
            self._save(done)
            raise Fault(
                f"the guard ended the run after step {done} of {self.recipe.steps}: {failed}; the last checkpoint is "
                f"that of step {self.saved_step}. Look at it with bin/compare; bin/resume goes on nevertheless"
            )

    def _save(self, done: int) -> None:
        """Save after step `done` unless that was done."""
        if done > self.saved_step:
            self.global_steps = done
            self._save_checkpoint()

    def _stop(self, done: int) -> None:
        request = json.loads(self.attempt.stop_request.read_text() or "{}")
        if request.get("save"):
            self._save(done)
        raise Stopped(
            f"stopped on request after step {done} of {self.recipe.steps}; the last checkpoint is that of step "
            f"{self.saved_step or 'none'}"
        )

    def _generate(self, prompts: list[Prompt], step: int, generation: int) -> Groups:
        """Generate `samples` answers to each prompt and score them."""
        batch = DataProto.from_single_dict(collate_fn([prompt.row for prompt in prompts]))
        asked = self._get_gen_batch(batch)
        ids = [prompt.id for prompt in prompts]
        asked.meta_info = {"global_steps": step, "generation": generation, "prompt_ids": ids}
        answers = self.async_rollout_manager.manager.generate_sequences(
            asked.repeat(self.sampling.samples, interleave=True)
        )
        timing = answers.meta_info.pop("timing", {})
        if self.recorder:
            self.recorder.keep(ids, answers)
        answers.meta_info = {}
        scored = self.reward_fn(batch.repeat(self.sampling.samples, interleave=True).union(answers), return_dict=True)
        answers.batch["rm_scores"] = scored["reward_tensor"]
        extras = {name: np.array(values) for name, values in scored["reward_extra_info"].items()}
        answers.non_tensor_batch.update(extras)
        self.extra_names = list(extras)
        if generation == 1:
            self.step_timing = {}
        for name, seconds in timing.items():
            self.step_timing[name] = self.step_timing.get(name, 0.0) + seconds
        return Groups(prompts, answers)

    def _outcomes(self, groups: Groups) -> np.ndarray:
        answers = groups.answers
        scores = answers.batch["rm_scores"].sum(-1).numpy()
        return accuracies(answers.non_tensor_batch, scores).reshape(-1, self.sampling.samples)

    def _deliver(self, found: StepGroups) -> dict:
        """Store the answers for `fit` and return the batch of their prompts."""
        prompts, answers = found.groups.prompts, found.groups.answers
        kept = len(prompts) - found.filled
        answers.non_tensor_batch["filled"] = np.repeat(np.arange(len(prompts)) >= kept, self.sampling.samples)
        # `fit` adds its own measurement of "gen" and "step" to these.
        answers.meta_info["timing"] = {**self.step_timing, "gen": found.seconds, "step": found.seconds}
        answers.meta_info["reward_extra_keys"] = self.extra_names
        self.async_rollout_manager.stored = answers
        weights = getattr(self.async_rollout_manager.manager, "weights", None)
        if self.recorder:
            self.recorder.finish(self.global_steps, weights, found.seconds)
        self.step_record = records.samples_record(self.global_steps, [p.id for p in prompts], answers, weights)
        self.step_metrics = dict(found.counters)
        self._warn(self.trend.observe(self.global_steps, found.counters["train/num_gen_batches"]))
        return collate_fn([prompt.row for prompt in prompts])

    def _weights_changed(self) -> None:
        if hasattr(self.async_rollout_manager.manager, "weights_changed"):
            self.async_rollout_manager.manager.weights_changed()

    @staticmethod
    def _warn(text: str | None) -> None:
        if text:
            print(text, flush=True)


def _join(parts: list[tuple[Groups, np.ndarray]]) -> Groups:
    """The chosen groups of several generations as one."""
    prompts, answers = [], []
    for groups, chosen in parts:
        if len(chosen) == 0:
            continue
        samples = len(groups.answers) // len(groups.prompts)
        rows = (np.asarray(chosen)[:, None] * samples + np.arange(samples)).reshape(-1)
        prompts += [groups.prompts[i] for i in chosen]
        answers.append(groups.answers.select_idxs(rows))
    return Groups(prompts, DataProto.concat(answers))
