#!/usr/bin/env python
"""Make the inputs of the recipe `tiny` again: checkpoint, prompts and checksums.

    python generate.py --out DIR    write everything to DIR (a few minutes on one core)
    python generate.py --check      make everything in a temporary folder and compare with SHA256SUMS

The bytes depend on the versions named in SHA256SUMS and on the processor's vector instructions.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import task

HERE = Path(__file__).resolve().parent
SUMS = "SHA256SUMS"
LAYERS_LISTED = 5  # four layers and the MTP layer
SHARD_BYTES = 300_000
TRAIN_ROWS, VAL_ROWS = 4096, 128


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("--out", type=Path, metavar="DIR", help="folder to write to")
    act.add_argument("--check", action="store_true", help="compare a fresh set with the committed one")
    chosen = parser.parse_args(arguments)
    if not chosen.check:
        generate(chosen.out)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        differing = compare(Path(folder))
    for line in differing:
        print(line)
    print(f"{len(differing)} of {len(read_sums(HERE / SUMS))} files differ")
    return 1 if differing else 0


def generate(out: Path) -> None:
    """Write model/, train.parquet, val.parquet and SHA256SUMS to `out`."""
    import base_model
    import fp8_checkpoint

    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_prompts(out)
    base_model.write_config(model)
    tokenizer = base_model.write_tokenizer(model)
    weights = base_model.warm_up(tokenizer, report=lambda line: print(line, flush=True))
    fp8_checkpoint.write(model, weights, LAYERS_LISTED, SHARD_BYTES)
    write_sums(out)


def write_prompts(out: Path) -> None:
    """Write the prompts in verl's schema; no validation question is a training question."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng, taken = random.Random(1), set()
    for split, count in (("val", VAL_ROWS), ("train", TRAIN_ROWS)):
        rows = [
            {
                "data_source": "tiny_first_digit",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"split": split, "index": index},
            }
            for index, (question, answer) in enumerate(task.pose_distinct(count, rng, taken))
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet", compression="zstd")


def write_sums(out: Path) -> None:
    """Write the checksums of what was generated, in the form `sha256sum -c` reads."""
    files = sorted(path for path in [*out.glob("*.parquet"), *out.glob("model/*")] if path.is_file())
    packages = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    lines = [f"{sha256(path)}  {path.relative_to(out)}" for path in files]
    (out / SUMS).write_text(f"# made with {versions}\n" + "\n".join(lines) + "\n")


def read_sums(file: Path) -> dict[str, str]:
    """The checksum of each file by its path relative to SHA256SUMS."""
    lines = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    return {path: digest for digest, path in lines}


def compare(fresh: Path) -> list[str]:
    """Lines naming the files whose checksum is not the committed one."""
    committed, made = read_sums(HERE / SUMS), read_sums(fresh / SUMS)
    return [
        f"{path}: made {made.get(path, 'nothing')[:12]}, committed {committed.get(path, 'nothing')[:12]}"
        for path in sorted({*committed, *made})
        if made.get(path) != committed.get(path)
    ]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
