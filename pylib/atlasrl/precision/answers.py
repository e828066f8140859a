"""Answers to score: from JSON lines, from verl's dumps, or from the recorded rollouts of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atlasrl.errors import Fault, UsageFault
from atlasrl.rundir import RunDir

SPELLINGS = {
    "solution_str": ("solution_str", "response", "output", "completion"),
    "ground_truth": ("ground_truth", "gts", "answer"),
    "data_source": ("data_source",),
}
"""Names of a field in files of JSON lines; `output` and `gts` are those of verl's trainer.rollout_data_dir."""


@dataclass(frozen=True)
class Answer:
    """What a reward rule is given, and where it came from."""

    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: dict = field(default_factory=dict)
    where: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)


def read(source: Path, step: int | None = None, data_source: str = "unknown") -> list[Answer]:
    """All answers of a source.

    Args:
        source: a file of JSON lines, a folder of them (verl's dumps), or a run with recorded rollouts.
        step: of a run, one recorded step; None takes all.
        data_source: for lines that name none.

    Raises:
        Fault: nothing to read; the message says what is missing.
    """
    if (source / "plan.json").is_file():
        return list(_of_run(RunDir(source), step))
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    found = [answer for file in files for answer in _of_lines(file, data_source)]
    if not found:
        raise UsageFault(
            f"{source} holds no answers: give a JSONL file, a folder of them, or a run that recorded rollouts"
        )
    return found


def _of_lines(file: Path, data_source: str) -> Iterator[Answer]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageFault(f"{file} cannot be read: {problem}") from None
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            values = {
                name: next(entry[s] for s in found if s in entry)
                for name, found in SPELLINGS.items()
                if name != "data_source"
            }
        except (ValueError, TypeError, StopIteration):
            wanted = " and ".join("/".join(SPELLINGS[name]) for name in ("solution_str", "ground_truth"))
            raise UsageFault(f"{file}:{number} is no answer: a JSON object with {wanted} is needed") from None
        yield Answer(
            str(entry.get("data_source", data_source)),
            **values,
            extra_info=entry.get("extra_info") or {},
            where=f"{file.name}:{number}",
        )


def _of_run(run: RunDir, step: int | None) -> Iterator[Answer]:
    """The recorded answers as verl's reward manager would decode them, with the rows that they answer."""
    from transformers import AutoTokenizer

    from atlasrl.precision import rollouts

    folder = rollouts.folder_of(run.path)
    plan = json.loads(run.plan.read_text())
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    rows = _rows(Path(plan["train"]))
    for each in rollouts.recorded_steps(folder) if step is None else [step]:
        for generation in rollouts.read(folder, each).generations:
            tensors = generation.tensors
            width = tensors["responses"].shape[1]
            for place, response in enumerate(tensors["responses"]):
                prompt = generation.prompts[place // generation.samples]
                row = rows.get(prompt.partition(":")[2])
                if row is None:
                    raise Fault(
                        f"prompt {prompt} of step {each} is not in {plan['train']}; the data changed since the run"
                    )
                said = response[tensors["attention_mask"][place, -width:].bool()].tolist()
                text = tokenizer.decode(said, skip_special_tokens=True).removesuffix(tokenizer.eos_token or "")
                yield Answer(
                    row["data_source"], text, row["reward_model"]["ground_truth"], row.get("extra_info") or {},
                    f"step {each}, prompt {prompt}, answer {place % generation.samples}",
                )  # fmt: skip


def _rows(train: Path) -> dict[str, dict]:
    """Content digest -> row of the training data."""
    import pyarrow.parquet

    from atlasrl.trainer.prompts import content_digest

    try:
        rows = pyarrow.parquet.read_table(train).to_pylist()
    except (OSError, ValueError) as problem:
        raise Fault(f"the run's training data {train} cannot be read: {problem}") from None
    return {content_digest({"raw_prompt": r["prompt"], "reward_model": r["reward_model"]}): r for r in rows}
