"""Rollouts of a run, kept so that the same steps can be trained again without generating: one file a step.

    RUN/rollouts/step_000012.safetensors

The header holds JSON (step, prompts, tokens, what the tensors were), the body the tensors of every generation of the
step, before scoring and filtering: a replay scores and filters again, so that reward rule and dynamic sampling are
part of what is compared. Nothing is a pickle. Per answer a file holds 4 bytes a prompt token, 10 a response token.

A replay is refused when the run asks for anything else than what was recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atlasrl.errors import Fault
from atlasrl.rundir import write_atomically

FORMAT = 1
KEY = "atlasrl.rollout"

RECOMPUTED: dict[str, Callable[[dict[str, torch.Tensor]], torch.Tensor]] = {
    "input_ids": lambda t: torch.cat([t["prompts"], t["responses"]], 1),
    "position_ids": lambda t: (t["attention_mask"].cumsum(1) - 1).clamp_(min=0),
}
"""Tensors that others determine; left out of the file where that is true of the recorded ones."""


@dataclass
class Generation:
    """The answers to one batch of prompts: row i·samples … (i+1)·samples-1 answers prompt i."""

    prompts: list[str]
    """ids, `<row>:<digest of content>`"""
    tokens: list[str]
    """digest of each prompt's tokens: chat template and tokenizer"""
    tensors: dict[str, torch.Tensor]
    columns: dict[str, list] = field(default_factory=dict)
    """other values per answer: name -> [numpy dtype, values]"""

    @property
    def samples(self) -> int:
        return len(next(iter(self.tensors.values()))) // len(self.prompts)


@dataclass
class Recording:
    """One step: its generations, in order, and what is known of them (`weights`, `seconds`)."""

    step: int
    generations: list[Generation]
    facts: dict = field(default_factory=dict)


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """Steps of a folder of recordings."""
    return sorted(int(file.stem.removeprefix("step_")) for file in folder.glob("step_*.safetensors"))


def folder_of(run_or_folder: Path) -> Path:
    """The folder of recordings, given itself or the run directory that owns it.

    Raises:
        Fault: there is no recording.
    """
    for folder in (run_or_folder / "rollouts", run_or_folder):
        if recorded_steps(folder):
            return folder
    raise Fault(f"{run_or_folder} holds no recorded rollouts; record them with rollout.record: true in the recipe")


def tokens_digest(tokens: Sequence[int]) -> str:
    """Twelve hex digits of a prompt's token ids."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:12]


def write(folder: Path, recording: Recording) -> Path:
    """Keep one step; an earlier recording of it is replaced as a whole."""
    from safetensors.torch import save

    tensors, entries = {}, []
    for number, generation in enumerate(recording.generations, 1):
        kept = {name: t for name, t in generation.tensors.items() if not _is_recomputed(name, generation.tensors)}
        tensors |= {f"{number}.{name}": _narrow(tensor) for name, tensor in kept.items()}
        entries.append(
            {
                "prompts": generation.prompts,
                "tokens": generation.tokens,
                "dtypes": {name: str(t.dtype).removeprefix("torch.") for name, t in generation.tensors.items()},
                "columns": generation.columns,
            }
        )
    header = {"format": FORMAT, "step": recording.step, "facts": recording.facts, "generations": entries}
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, recording.step)
    write_atomically(path, save(tensors, {KEY: json.dumps(header)}))
    return path


def read(folder: Path, step: int) -> Recording:
    """Read one step; tensors are bitwise what was recorded.

    Raises:
        Fault: no recording of this step, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    path = file_of(folder, step)
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})[KEY])
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except FileNotFoundError:
        raise Fault(f"step {step} is not recorded in {folder}") from None
    except (SafetensorError, ValueError, KeyError) as problem:
        raise Fault(f"{path} is no recorded rollout: {problem}; it is damaged or of another kind") from None
    if header["format"] != FORMAT:
        raise Fault(f"{path} has format {header['format']}, this version reads {FORMAT}; record the run again")
    generations = []
    for number, entry in enumerate(header["generations"], 1):
        tensors = {
            name: stored[f"{number}.{name}"].to(getattr(torch, dtype))
            for name, dtype in entry["dtypes"].items()
            if f"{number}.{name}" in stored
        }
        for name in entry["dtypes"].keys() - tensors.keys():
            tensors[name] = RECOMPUTED[name](tensors)
        ordered = {name: tensors[name] for name in entry["dtypes"]}
        generations.append(Generation(entry["prompts"], entry["tokens"], ordered, entry["columns"]))
    return Recording(header["step"], generations, header["facts"])


class Replay:
    """Gives recorded answers to the prompts that they were recorded for, and to no others."""

    def __init__(self, run_or_folder: Path, steps: int):
        self.folder, self.steps = folder_of(run_or_folder), steps
        self.recording: Recording | None = None

    def generation(self, step: int, number: int, prompts: list[str], tokens: list[str], samples: int) -> Generation:
        """The recorded generation of `prompts`.

        Args:
            prompts, tokens: ids and token digests of what the run asks now.
            samples: answers per prompt.

        Raises:
            Fault: other prompts, another order, other tokens, another number of answers, or nothing recorded.
        """
        if self.recording is None or self.recording.step != step:
            self._check_steps(step)
            self.recording = read(self.folder, step)
        where = f"replay of {self.folder}, step {step}, generation {number}"
        if number > len(self.recording.generations):
            raise Fault(
                f"{where}: only {len(self.recording.generations)} recorded, but dynamic sampling asks for another: the "
                "reward rule or the dapo settings differ from the recorded run's"
            )
        found = self.recording.generations[number - 1]
        if (reason := difference(found, prompts, tokens, samples)) is not None:
            raise Fault(f"{where}: {reason}")
        return found

    def _check_steps(self, first: int) -> None:
        known = set(recorded_steps(self.folder))
        missing = [step for step in range(first, self.steps + 1) if step not in known]
        if missing:
            raise Fault(
                f"{self.folder} lacks step {missing[0]} ({len(missing)} of steps {first} to {self.steps} are missing); "
                f"set steps to at most {max(known)}, or record a longer run"
            )


def difference(found: Generation, prompts: list[str], tokens: list[str], samples: int) -> str | None:
    """Why a recorded generation does not answer these prompts; None if it does."""
    if (len(prompts), samples) != (len(found.prompts), found.samples):
        return (
            f"{len(found.prompts)} prompts × {found.samples} answers are recorded, {len(prompts)} × {samples} are "
            "asked for; replay with the recorded run's dapo batch sizes and rollout.samples"
        )
    for place, (recorded, asked) in enumerate(zip(found.prompts, prompts, strict=True)):
        if recorded == asked:
            continue
        told = f"prompt {place} is {asked}, recorded is {recorded}"
        if sorted(found.prompts) == sorted(prompts):
            return f"{told}: the same prompts in another order; the seed or data.shuffle differs"
        return f"{told}: other data, another seed or another batch size; replay with the recorded run's recipe"
    for place, (recorded, asked) in enumerate(zip(found.tokens, tokens, strict=True)):
        if recorded != asked:
            return (
                f"prompt {place} ({prompts[place]}) is the same text but has other tokens than the recorded ones; the "
                "tokenizer or its chat template differs"
            )
    return None


def _is_recomputed(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    if name not in RECOMPUTED:
        return False
    try:
        return torch.equal(RECOMPUTED[name](tensors), tensors[name])
    except (KeyError, RuntimeError):
        return False


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the fewest bytes that hold them."""
    if tensor.dtype == torch.int64 and tensor.numel():
        low, high = int(tensor.min()), int(tensor.max())
        for narrow in (torch.uint8, torch.int32):
            if torch.iinfo(narrow).min <= low and high <= torch.iinfo(narrow).max:
                return tensor.to(narrow).contiguous()
    return tensor.contiguous()
