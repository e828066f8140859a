#!/usr/bin/env python
"""Measure ckpt_tools against plain torch, a plain copy and a peer, and print one table of figures and ratios.

    python tests/bench/bench_ckpt.py                      1 GB of FP8, /dev/shm and the temporary folder
    python tests/bench/bench_ckpt.py --gigabytes 4 --disk /data

Every ratio compares two measurements of this run; files are pushed out of the page cache before a disk is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ckpt_tools.checkpoint import read_checkpoint  # noqa: E402
from ckpt_tools.deep import read_all  # noqa: E402
from ckpt_tools.diff import diff  # noqa: E402
from ckpt_tools.header import Tensor, header_bytes  # noqa: E402
from ckpt_tools.verify import verify  # noqa: E402

ROWS, COLUMNS = 2048, 7168
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
Row = tuple[str, str, str, str]


def best_of(function: Callable[[], object], times: int = 3, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest run."""
    fastest = float("inf")
    for _ in range(times):
        before()
        started = time.perf_counter()
        function()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def by_workers(function: Callable, source: Path, target: Path, times: int, cold: bool = False) -> dict[int, float]:
    """Seconds of the fastest run with 1 and with 2 workers, each into an empty folder, `cold` from the disk itself."""

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if cold:
            forget(source)

    return {workers: best_of(partial(function, source, target, workers), times, clear) for workers in (1, 2)}


def speed(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.2f} GB/s"


def write_model(folder: Path, gigabytes: float) -> int:
    """Write an FP8 model of matrices [2048, 7168] in shards of 16, an even number of them; returns its FP8 bytes."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 126, (ROWS, COLUMNS), dtype=np.uint8).tobytes()
    scales = generator.uniform(1e-4, 1e-3, (ROWS // 128, COLUMNS // 128)).astype("<f4").tobytes()
    count = max(2, round(gigabytes * 1e9 / len(codes)))
    shards = 2 * max(1, round(count / 32))  # with an odd one, two workers could not be twice as fast as one
    weight_map, total = {}, 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors, position = [], 0
        for number in range(shard, count, shards):
            name = f"layers.{number}.weight"
            for key, dtype, shape, size in (
                (f"{name}_scale_inv", "F32", (ROWS // 128, COLUMNS // 128), len(scales)),
                (name, "F8_E4M3", (ROWS, COLUMNS), len(codes)),
            ):
                tensors.append(Tensor(key, dtype, shape, position, position + size))
                position += size
        with (folder / file).open("wb") as out:
            out.write(header_bytes(tensors, {"format": "pt"}))
            for tensor in tensors:
                out.write(scales if tensor.dtype == "F32" else codes)
            out.flush()
            os.fsync(out.fileno())
        weight_map |= {tensor.name: file for tensor in tensors}
        total += position
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANTISED}))
    return count * len(codes)


def forget(folder: Path) -> None:
    """Push a folder's files out of the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def command_cast(source: Path, target: Path, workers: int) -> None:
    subprocess.run(cast_command(source, target, workers), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def cast_command(source: Path, target: Path, workers: int) -> list[str]:
    command = [sys.executable, "-m", "ckpt_tools", "cast", str(source), str(target)]
    return [*command, "--workers", str(workers), "--json"]


PEAK_SCRIPT = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(command: list[str]) -> int:
    """Most memory of one of a command's processes; started from a small one, whose size a child inherits."""
    run = subprocess.run([sys.executable, "-c", PEAK_SCRIPT, *command], check=True, cwd=ROOT, capture_output=True)
    return int(run.stdout)


PLAIN_SCRIPT = """
import sys, json, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
source, target = Path(sys.argv[1]), Path(sys.argv[2])
for path in sorted(source.glob("*.safetensors")):
    state, out = load_file(path), {}
    for name, w in state.items():
        if not name.endswith("_scale_inv"):
            s = state[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            out[name] = (w.float() * s[: w.shape[0], : w.shape[1]]).to(torch.bfloat16)
    save_file(out, target / path.name)
"""

PEER_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from compressed_tensors.entrypoints.convert import convert_checkpoint, FP8BlockDequantizer
convert_checkpoint(sys.argv[1], sys.argv[2], FP8BlockDequantizer(targets=[r"re:.*"]), max_workers=int(sys.argv[3]))
"""


def script_cast(script: str, source: Path, target: Path, workers: int = 1) -> None:
    command = [sys.executable, "-c", script, str(source), str(target), str(workers)]
    subprocess.run(command, check=True, capture_output=True)


def measure_memory() -> list[Row]:
    """The loop alone, in memory, on one core: against the formula in plain torch and against a copy."""
    import torch

    from ckpt_tools.kernels import dequantise_into

    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 126, (ROWS, COLUMNS), dtype=np.uint8)
    scales = generator.uniform(1e-4, 1e-3, (ROWS // 128, COLUMNS // 128)).astype(np.float32)
    out, other = np.empty(codes.shape, np.uint16), np.empty(codes.shape, np.uint16)
    weight, scale = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)

    def plain():
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (weight.float() * wide).to(torch.bfloat16)

    def blocked():
        wide = weight.float().view(ROWS // 128, 128, COLUMNS // 128, 128)
        return wide.mul_(scale[:, None, :, None]).view(ROWS, COLUMNS).to(torch.bfloat16)

    dequantise_into(codes, 0, scales, 128, 128, out)
    assert plain().view(torch.int16).numpy().tobytes() == out.tobytes(), "the loop and the formula disagree"
    ours = best_of(lambda: dequantise_into(codes, 0, scales, 128, 128, out), 15)
    theirs, better = best_of(plain, 5), best_of(blocked, 5)
    copied = best_of(lambda: np.copyto(other, out), 15)
    count = codes.nbytes
    return [
        ("cast loop, one core, in memory", speed(count, ours), f"{theirs / ours:.1f}x plain torch", "8x"),
        ("  plain torch, the formula", speed(count, theirs), "", ""),
        ("  plain torch, blocked in place", speed(count, better), f"loop is {better / ours:.1f}x", ""),
        ("  copy of the BF16 bytes", speed(out.nbytes, copied), "", ""),
    ]


def measure_tmpfs(folder: Path, gigabytes: float) -> list[Row]:
    """The whole command on tmpfs: against a plain script, the peer if it is installed, and with 2 workers."""
    source, target, small = folder / "fp8", folder / "bf16", folder / "small"
    count = write_model(source, gigabytes)
    write_model(small, 0)
    fixed = by_workers(command_cast, small, target, 3)
    ours = by_workers(command_cast, source, target, 3)
    copied = by_workers(copy_bytes, source, target, 3)
    shutil.rmtree(target)
    peak = peak_bytes(cast_command(source, target, 1))
    shard = max(path.stat().st_size for path in target.glob("*.safetensors"))
    shutil.rmtree(target)
    target.mkdir()
    plain = best_of(partial(script_cast, PLAIN_SCRIPT, source, target), 1)
    apart = (ours[1] - fixed[1]) / (ours[2] - fixed[2])
    rows = [
        ("cast command, tmpfs, 1 worker", speed(count, ours[1]), f"{plain / ours[1]:.1f}x plain script", ""),
        ("cast command, tmpfs, 2 workers", speed(count, ours[2]), f"{ours[1] / ours[2]:.2f}x 1 worker", "1.8x"),
        ("  fixed cost, 1 and 2 workers", f"{fixed[1]:.2f}, {fixed[2]:.2f} s", f"without it {apart:.2f}x", "1.8x"),
        ("  copy of the bytes in and out", speed(count, copied[1]), f"2 copies: {copied[1] / copied[2]:.2f}x", ""),
        ("  peak memory of a worker", f"{peak / 1e6:.0f} MB", f"{peak / shard:.2f} of an output shard", "2"),
    ]
    try:
        peer = by_workers(partial(script_cast, PEER_SCRIPT), source, target, 1)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines()[-1][:60]
        rows.append(("  compressed-tensors", "not measured", reason, "4x"))
    else:
        for workers, seconds in peer.items():
            ratio = f"ours is {seconds / ours[workers]:.1f}x"
            rows.append((f"  compressed-tensors, {workers} workers", speed(count, seconds), ratio, "4x"))
    shutil.rmtree(folder)
    return rows


def copy_shard(path: Path, target: Path) -> None:
    """Read a shard and write it twice into one file, fsync: the bytes that a cast moves, without the arithmetic."""
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file, (target / path.name).open("wb", buffering=0) as out:
        while count := file.readinto(buffer):
            out.write(memoryview(buffer)[:count])
            out.write(memoryview(buffer)[:count])
        os.fsync(out.fileno())


def copy_bytes(source: Path, target: Path, workers: int = 1) -> None:
    with get_context("fork").Pool(workers) as pool:
        pool.starmap(copy_shard, [(path, target) for path in sorted(source.glob("*.safetensors"))], chunksize=1)


def read_bytes(folder: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure_disk(folder: Path, gigabytes: float) -> list[Row]:
    """Against what the disk itself can do: a cast and a copy of its bytes, diff and deep verify and a plain read."""
    source, target, copy = folder / "fp8", folder / "bf16", folder / "copy"
    count = write_model(source, gigabytes)
    copied = by_workers(copy_bytes, source, copy, 2, cold=True)
    cast = by_workers(command_cast, source, target, 2, cold=True)
    shutil.rmtree(copy)
    shutil.copytree(target, copy)
    size = read_checkpoint(target).nbytes
    read = best_of(lambda: read_bytes(target), 2, lambda: forget(target))
    deep = best_of(lambda: read_all(read_checkpoint(target), 2), 2, lambda: forget(target))
    compared = best_of(lambda: diff(target, copy), 2, lambda: (forget(target), forget(copy)))
    shutil.rmtree(folder)
    rows = []
    for n in (1, 2):
        ratio = f"{copied[n] / cast[n]:.2f} of such a copy"
        rows.append((f"cast command, disk, {n} workers", speed(count, cast[n]), ratio, "0.9"))
        rows.append((f"  copy of the bytes in and out, {n} processes", speed(count, copied[n]), "", ""))
    ratio = f"{2 * read / compared:.2f} of a plain read"
    return [
        *rows,
        ("verify --deep, disk", speed(size, deep), f"{read / deep:.2f} of a plain read", "0.7"),
        ("diff of two BF16 models, disk", speed(2 * size, compared), ratio, "0.7"),
        ("  plain read", speed(size, read), "", ""),
    ]


def write_sparse(folder: Path) -> None:
    """DeepSeek-V3 in FP8 as far as headers show: 163 shards, 91,991 tensors, no data on disk."""
    folder.mkdir(parents=True)
    from ckpt_tools.families import expected_shapes
    from ckpt_tools.quantization import scale_shape

    config = json.loads((Path(__file__).parent / "deepseek_v3_config.json").read_text())
    tensors = []
    for name, shape in expected_shapes(config).items():
        plain = len(shape) == 1 or any(part in name for part in ("embed", "head", "gate.weight", "eh_proj"))
        dtype = "F32" if name.endswith("bias") else "BF16" if plain else "F8_E4M3"
        tensors.append((name, dtype, shape))
        if dtype == "F8_E4M3":
            tensors.append((f"{name}_scale_inv", "F32", scale_shape(shape, (128, 128))))
    weight_map, total, width = {}, 0, {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    for shard in range(163):
        members, position = [], 0
        for name, dtype, shape in tensors[shard * len(tensors) // 163 : (shard + 1) * len(tensors) // 163]:
            size = int(np.prod(shape)) * width[dtype]
            members.append(Tensor(name, dtype, shape, position, position + size))
            position += size
        file = f"model-{shard + 1:05d}-of-000163.safetensors"
        text = header_bytes(members, {"format": "pt"})
        with (folder / file).open("wb") as out:
            out.write(text)
            out.truncate(len(text) + position)
        weight_map |= {tensor.name: file for tensor in members}
        total += position
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def measure_verify(folder: Path) -> list[Row]:
    write_sparse(folder)
    report = verify(folder)
    assert report.findings == [], report.findings[:3]
    seconds = best_of(lambda: verify(folder), 3)
    command = [sys.executable, "-m", "ckpt_tools", "verify", str(folder), "--json"]
    whole = best_of(lambda: subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL), 3)
    shutil.rmtree(folder)
    facts = report.facts
    what = f"{facts['shards']} shards, {facts['tensors']} tensors"
    return [
        (f"verify, {what}", f"{seconds:.2f} s", f"{facts['read_bytes'] / 1e6:.1f} MB of {facts['data']} read", "2 s"),
        ("  the whole command", f"{whole:.2f} s", "", "2 s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="FP8 bytes of the model")
    parser.add_argument("--disk", type=Path, help="folder on the disk to measure")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    chosen = parser.parse_args()
    rows: list[Row] = measure_memory()
    with tempfile.TemporaryDirectory(dir=chosen.tmpfs) as shm, tempfile.TemporaryDirectory(dir=chosen.disk) as disk:
        rows += measure_tmpfs(Path(shm) / "bench", chosen.gigabytes)
        rows += measure_disk(Path(disk) / "bench", chosen.gigabytes)
        rows += measure_verify(Path(disk) / "sparse")
    print(f"{'what':<46} {'figure':>14}  {'ratio':<34} goal")
    for what, figure, ratio, goal in rows:
        print(f"{what:<46} {figure:>14}  {ratio:<34} {goal}")


if __name__ == "__main__":
    main()
