"""Cut a model down to its first layers (and experts), for trials on few devices.

The kept layers keep their weights bit for bit and are numbered from 0; the config says the same. MTP goes. With all
dense layers kept, the small model's hidden states are those of the full model after as many layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpt_tools import families
from ckpt_tools.cast import copy_side_files
from ckpt_tools.checkpoint import Checkpoint, read_checkpoint
from ckpt_tools.checksum import write_checksums
from ckpt_tools.errors import Fault, UsageFault
from ckpt_tools.files import STATE_FOLDER, check_room, write_atomically, write_json
from ckpt_tools.header import BITS, Tensor, element_count, expected_bytes, header_bytes
from ckpt_tools.index import INDEX_NAME, index_text
from ckpt_tools.plan import Move, ShardJob, Span, choose_tensors, job_stamp, output_names, span_of
from ckpt_tools.shard import cast_shard
from ckpt_tools.verify import verify

ROUTER = re.compile(r"\.mlp\.gate\.(weight|e_score_correction_bias)$")


@dataclass(frozen=True, slots=True)
class Cut:
    """Which layers stay, in order (their position is their new number), and how many experts each keeps (0: all)."""

    layers: tuple[int, ...]
    dense: int
    experts: int


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    jobs: tuple[ShardJob, ...]
    index: dict
    config: dict
    notes: tuple[str, ...]
    source: Path
    target: Path


def choose_layers(config: dict, dense: int | None, moe: int | None, experts: int | None) -> Cut:
    """Turn "the first K dense and M MoE layers" into layer numbers.

    Args:
        dense: dense layers to keep; None: all that stand before the MoE layers, or all of a dense model.
        moe: MoE layers to keep; None: all.
        experts: routed experts per layer to keep; None: all.

    Raises:
        UsageFault: there are fewer layers or experts than asked for, or the experts do not fit the routing.
    """
    layers, total_experts = families.layer_count(config), families.expert_count(config)
    if layers is None:
        raise UsageFault("config.json has no num_hidden_layers; only decoder models of that form can be shrunk")
    dense_layers, moe_layers = _kinds(config, layers, total_experts)
    wanted_dense = len(dense_layers) if dense is None else dense
    wanted_moe = len(moe_layers) if moe is None else moe
    for what, wanted, there in (("dense", wanted_dense, dense_layers), ("MoE", wanted_moe, moe_layers)):
        if not 0 <= wanted <= len(there):
            raise UsageFault(f"{wanted} {what} layers asked for, the model has {len(there)}")
    kept = sorted([*dense_layers[:wanted_dense], *moe_layers[:wanted_moe]])
    if not kept:
        raise UsageFault("no layer would be left; keep at least one")
    if experts is not None:
        per_token = config.get("num_experts_per_tok", 1)
        if not max(1, per_token) <= experts <= total_experts:
            raise UsageFault(
                f"{experts} experts asked for; the model has {total_experts} and uses {per_token} per token"
            )
    return Cut(tuple(kept), wanted_dense, experts or 0)


def _kinds(config: dict, layers: int, experts: int) -> tuple[list[int], list[int]]:
    """Numbers of the dense and of the MoE layers."""
    everything = range(layers)
    if not experts:
        return list(everything), []
    if config.get("model_type") == "deepseek_v3":
        first, frequency = config.get("first_k_dense_replace", 0), config.get("moe_layer_freq") or 1
        moe = [n for n in everything if n >= first and n % frequency == 0]
    else:
        only, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
        moe = [n for n in everything if n not in only and (n + 1) % step == 0]
    return [n for n in everything if n not in moe], moe


def shrunk_config(config: dict, cut: Cut) -> tuple[dict, list[str]]:
    """The config of the small model, and a line for every entry that changed."""
    new = dict(config)
    new["num_hidden_layers"] = len(cut.layers)
    if "first_k_dense_replace" in config:
        new["first_k_dense_replace"] = cut.dense
    if families.mtp_layers(config):
        new["num_nextn_predict_layers"] = 0
    if isinstance(config.get("layer_types"), list):
        new["layer_types"] = [config["layer_types"][n] for n in cut.layers if n < len(config["layer_types"])]
    if config.get("mlp_only_layers"):
        new["mlp_only_layers"] = [new for new, old in enumerate(cut.layers) if old in config["mlp_only_layers"]]
    if type(config.get("max_window_layers")) is int:
        new["max_window_layers"] = min(config["max_window_layers"], len(cut.layers))
    if cut.experts:
        for key in ("n_routed_experts", "num_experts", "num_local_experts"):
            if key in config:
                new[key] = cut.experts
        _fit_groups(new, cut.experts)
    notes = [
        f"config.json: {key} {config.get(key)} -> {value}" for key, value in new.items() if config.get(key) != value
    ]
    return new, notes


def _fit_groups(config: dict, experts: int) -> None:
    """Keep DeepSeek's group-limited routing legal: equal groups of at least 2, enough experts in the chosen groups."""
    groups, chosen = config.get("n_group"), config.get("topk_group")
    if type(groups) is not int or type(chosen) is not int:
        return
    size, rest = divmod(experts, groups)
    if rest or size < 2 or size * chosen < config.get("num_experts_per_tok", 1):
        config["n_group"] = config["topk_group"] = 1


def rename(name: str, cut: Cut) -> str | None:
    """The tensor's name in the small model, None when it is not part of it."""
    match = families.LAYER.match(name)
    if not match:
        return None if name.startswith("mtp.") else name
    layer = int(match["layer"][:9])
    if layer not in cut.layers:
        return None
    expert = families.EXPERT.match(name)
    if cut.experts and expert and int(expert["expert"][:9]) >= cut.experts:
        return None
    return f"{match['stem']}.{cut.layers.index(layer)}.{match['rest']}"


def _sliced(span: Span, name: str, cut: Cut) -> Span:
    """The router's rows of the kept experts: they come first, so a prefix of the bytes is all."""
    if not cut.experts or not ROUTER.search(name):
        return span
    shape = (cut.experts, *span.shape[1:])
    return Span(span.file, span.begin, span.begin + expected_bytes(span.dtype, shape), span.dtype, shape)


def plan_shrink(checkpoint: Checkpoint, target: Path, dense=None, moe=None, experts=None) -> ShrinkPlan:
    """Plan the small model from headers alone.

    Raises:
        UsageFault: the layers or experts asked for are not there.
        Fault: shards of the source are broken or lost.
    """
    cut = choose_layers(checkpoint.config, dense, moe, experts)
    config, notes = shrunk_config(checkpoint.config, cut)
    kept, _ = choose_tensors(checkpoint, "drop", keep_buffers=False)
    by_file: dict[str, list[tuple[str, str, Span]]] = {}
    for name, file in kept.items():
        if new := rename(name, cut):
            span = _sliced(span_of(checkpoint.headers[file], checkpoint.headers[file].tensors[name]), name, cut)
            by_file.setdefault(file, []).append((new, name, span))
    names = output_names(sorted(by_file), all_survive=False)
    jobs, weight_map, total = [], {}, 0
    for file, members in sorted(by_file.items()):
        job = _shard_job(checkpoint, target, names[file], members)
        jobs.append(job)
        weight_map |= {move.name: job.file for move in job.moves}
        total += job.read_bytes
    metadata = {"total_size": total}
    if checkpoint.index and "total_parameters" in checkpoint.index.metadata:
        metadata["total_parameters"] = sum(element_count(move.source.shape) for job in jobs for move in job.moves)
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return ShrinkPlan(tuple(jobs), index, config, tuple(notes), checkpoint.path, target)


def _shard_job(checkpoint: Checkpoint, target: Path, file: str, members: Iterable[tuple[str, str, Span]]) -> ShardJob:
    ordered = sorted(members, key=lambda member: (-BITS[member[2].dtype], member[2].begin))
    placed, position = [], 0
    for new, _, span in ordered:
        placed.append(Tensor(new, span.dtype, span.shape, position, position + span.nbytes))
        position += span.nbytes
    text = header_bytes(placed, {"format": "pt"})
    moves = tuple(
        Move(tensor.name, span, None, len(text) + tensor.begin)
        for tensor, (_, _, span) in zip(placed, ordered, strict=True)
    )
    stamp = job_stamp(text, moves, (1, 1), checkpoint.path)
    return ShardJob(str(checkpoint.path), str(target), file, text, moves, (1, 1), len(text) + position, stamp)


def shrink(source: Path | str, target: Path | str, dense=None, moe=None, experts=None, progress=None) -> ShrinkPlan:
    """Write the small model into a new folder, and verify it.

    Raises:
        UsageFault: the target exists and is not empty; layers or experts asked for are not there.
        Fault: the source is broken, or the result does not verify.
    """
    target = Path(target).absolute()
    plan = plan_shrink(read_checkpoint(Path(source).absolute()), target, dense, moe, experts)
    if target.exists() and any(target.iterdir()):
        raise UsageFault(f"{target}: is not empty; give a new folder")
    (target / STATE_FOLDER / "cast").mkdir(parents=True, exist_ok=True)
    size = sum(job.size for job in plan.jobs)
    check_room(target, size)
    checksums: dict[str, str] = {}
    done = 0
    for job in plan.jobs:
        checksums |= cast_shard(job)["tensors"]
        done += job.size
        if progress:
            progress(done, size)
    copy_side_files(plan.source, target)
    write_checksums(target, checksums)
    write_json(target / "config.json", plan.config)
    write_atomically(target / INDEX_NAME, index_text(plan.index))
    report = verify(target)
    if report.errors:
        raise Fault(f"{target}: the small model does not verify: {report.errors[0]}")
    return plan
