"""Prompts from reasoning-gym, seeded, in verl's parquet schema."""

from __future__ import annotations

from pathlib import Path

TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
INSTRUCTION = "Be brief."  # shorter than the model's own system message, and it makes a third of the answers right
SEED = {"val": 1_000_000, "train": 2_000_000}  # question i is drawn from seed + i
ROWS = {"val": 20, "train": 160}  # of the 200 questions there are


def write(out: Path) -> dict[str, int]:
    """Write DIR/val.parquet and DIR/train.parquet; no validation question is a training question. Return row counts."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from reasoning_gym import create_dataset

    taken: set[str] = set()
    for split, count in ROWS.items():
        rows = []
        for entry in create_dataset(TASK, seed=SEED[split], size=100 * count, **SETTINGS):
            if len(rows) == count:
                break
            if entry["question"] not in taken:
                taken.add(entry["question"])
                rows.append(_row(entry, split, len(rows)))
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet", compression="zstd")
    return ROWS


def _row(entry: dict, split: str, index: int) -> dict:
    return {
        "data_source": f"reasoning_gym/{TASK}",
        "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": entry["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"split": split, "index": index},
    }
