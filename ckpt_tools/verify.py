"""Check a checkpoint from its headers: index against shards, shards against sizes, all of it against the config.

Nothing here reads tensor data, so 163 shards of a 671B model take a second or two. `deep.py` reads the data.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

from ckpt_tools import families
from ckpt_tools.checkpoint import SHARD_NAME, Checkpoint, read_checkpoint
from ckpt_tools.errors import Fault
from ckpt_tools.files import human, is_plain_name
from ckpt_tools.quantization import block_of, quantization_of, quantization_problems
from ckpt_tools.report import Report

COPY_AGAIN = "copy or download this shard again"
REPAIR = "run `ckpt repair`"
CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def verify(folder: Path | str) -> Report:
    """Check one Hugging Face checkpoint folder.

    Returns:
        a report; `exit_code` is 0 when it holds no error. Warnings are oddities that no loader trips over.

    Raises:
        UsageFault: there is no checkpoint in the folder.

    Example:
        >>> verify("runs/night/model").errors  # doctest: +SKIP
        []
    """
    folder = Path(folder)
    report = Report(str(folder))
    try:
        checkpoint = read_checkpoint(folder)
    except Fault as fault:
        if fault.exit_code == 2:
            raise
        report.error("unreadable_json", str(folder), str(fault), "nothing else was checked")
        return report
    count_facts(checkpoint, report)
    check_files(checkpoint, report)
    check_index(checkpoint, report)
    check_total_size(checkpoint, report)
    check_model(checkpoint, report)
    check_quantization(checkpoint, report)
    return report


def count_facts(checkpoint: Checkpoint, report: Report) -> None:
    headers = checkpoint.headers.values()
    dtypes = Counter(tensor.dtype for header in headers for tensor in header.tensors.values())
    report.facts |= {
        "shards": len(checkpoint.headers),
        "tensors": sum(dtypes.values()),
        "data": human(checkpoint.nbytes),
        "data_bytes": checkpoint.nbytes,
        "dtypes": dict(sorted(dtypes.items())),
        "read_bytes": sum(header.data_start for header in headers),
    }


def check_files(checkpoint: Checkpoint, report: Report) -> None:
    """Broken shards, shards without `format`, empty shards, and a numbering that has gaps."""
    for file, fault in checkpoint.broken.items():
        report.error(fault.kind, file, fault.problem, fault.remedy)
    for file, header in checkpoint.headers.items():
        if not (header.metadata or {}).get("format"):
            problem = "its header has no metadata `format`, which older transformers and accelerate refuse"
            report.warn("no_format", file, problem, f"{REPAIR} (rewrites the header only)")
        if not header.tensors:
            report.warn("empty_shard", file, "holds no tensor", f"{REPAIR} (removes it)")
    for header in checkpoint.strangers:
        problem = f"is no part of this checkpoint ({len(header.tensors)} tensors); it is never loaded"
        report.warn("unlisted_file", header.path.name, problem, "move it elsewhere if it does not belong here")
    present = set(checkpoint.headers) | set(checkpoint.broken)
    numbered = [match for file in present if (match := SHARD_NAME.fullmatch(file))]
    by_stem: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for match in numbered:
        by_stem[match["stem"]][int(match["count"][:9])].add(int(match["number"][:9]))
    for stem, counts in by_stem.items():
        if len(counts) > 1:
            problem = f"shards of {len(counts)} numberings are mixed: of {', '.join(map(str, sorted(counts)))}"
            report.error("mixed_numbering", stem, problem, "remove the shards of the older save")
            continue
        ((count, numbers),) = counts.items()
        if len(numbers) != count:
            problem = f"{len(numbers)} of {count} numbered shards are there, {_gaps(numbers, count)} missing"
            report.error("missing_shard", stem, problem, "copy the missing shards, or renumber with `ckpt repair`")


def _gaps(numbers: set[int], count: int) -> str:
    absent = [str(number) for number in range(1, min(count, 100_000) + 1) if number not in numbers]
    return ", ".join(absent[:10]) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")


def check_index(checkpoint: Checkpoint, report: Report) -> None:
    """Index against headers, both directions; tensors that several shards hold."""
    index, locations = checkpoint.index, checkpoint.locations()
    for name, files in locations.items():
        if len(files) > 1:
            report.error("tensor_twice", name, f"lies in {' and '.join(files)}", "remove the shard of the older save")
    if index is None:
        if len(checkpoint.headers) + len(checkpoint.broken) > 1:
            problem = f"{len(checkpoint.headers)} shards without model.safetensors.index.json"
            report.error("no_index", checkpoint.path.name, problem, f"{REPAIR} --rebuild-index")
        return
    for name in index.repeated:
        report.error("duplicate_key", index.path.name, f"{name!r} is listed twice; readers keep the last", REPAIR)
    if not index.weight_map:
        report.error("empty_index", index.path.name, "its weight_map is empty", f"{REPAIR} --rebuild-index")
    unsafe = {file for file in index.files() if not is_plain_name(file)}
    for file in sorted(unsafe):
        problem = f"names {file!r}, which is not a file of this folder"
        report.error("unsafe_name", index.path.name, problem, "do not load it; rebuild the index from the shards")
    missing_files = Counter()
    for name, file in index.weight_map.items():
        if file in unsafe or file in checkpoint.broken:
            continue
        if file not in checkpoint.headers:
            missing_files[file] += 1
        elif file not in locations.get(name, ()):
            _absent_tensor(report, name, file, locations.get(name))
    for file, count in missing_files.items():
        report.error("missing_file", file, f"the index places {count} tensors in it, the file is not there", COPY_AGAIN)
    _unlisted(checkpoint, report)


def _absent_tensor(report: Report, name: str, file: str, elsewhere: list[str] | None) -> None:
    if elsewhere:
        report.error("wrong_file", name, f"the index places it in {file}, it lies in {elsewhere[0]}", REPAIR)
    elif families.STALE_BUFFER.search(name):
        problem = f"listed in the index for {file}, held by no shard; mbridge then never saves that shard"
        report.error("stale_key", name, problem, f"{REPAIR} (drops the key; the model computes this buffer)")
    else:
        report.error("absent_tensor", name, f"listed in the index for {file}, held by no shard", COPY_AGAIN)


def _unlisted(checkpoint: Checkpoint, report: Report) -> None:
    """Tensors of shards that the index does not know."""
    for file, header in checkpoint.headers.items():
        for name in header.tensors:
            if name not in checkpoint.index.weight_map:
                report.error("unlisted_tensor", name, f"lies in {file}, the index does not list it", REPAIR)


def check_total_size(checkpoint: Checkpoint, report: Report) -> None:
    index = checkpoint.index
    if index is None or checkpoint.broken:
        return
    headers = [checkpoint.headers[file] for file in index.files() if file in checkpoint.headers]
    stated, actual = index.metadata.get("total_size"), sum(header.nbytes for header in headers)
    if stated is None:
        report.warn("no_total_size", index.path.name, "metadata has no total_size; some loaders need it", REPAIR)
    elif stated == sum(header.file_size for header in headers) != actual:
        problem = f"total_size {stated} counts the files with their headers, the tensors have {actual} bytes"
        report.warn("total_size", index.path.name, problem, REPAIR)
    elif stated != actual:
        report.error("total_size", index.path.name, f"total_size is {stated}, the tensors have {actual} bytes", REPAIR)


def check_model(checkpoint: Checkpoint, report: Report) -> None:
    """Layers, experts, tied embeddings, MTP, names and shapes against the config; dtypes against its dtype."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    if not config:
        report.warn("no_config", checkpoint.path.name, "no config.json: the model was not checked", "restore it")
        return
    names = set(tensors)
    weights = {name for name in names if not name.endswith(families.SCALE_SUFFIX)}
    _check_layers(weights, config, report)
    if families.is_tied(config) and "lm_head.weight" not in names:
        report.facts["lm_head"] = "absent, tied to the embedding"
    _check_dtype(checkpoint, report)
    if checkpoint.broken or (expected := families.expected_shapes(config)) is None:
        return
    mtp_absent = families.mtp_layers(config) and not any(families.is_mtp(name, config) for name in weights)
    for name in sorted(expected.keys() - weights):
        if not (mtp_absent and families.is_mtp(name, config)):
            report.error("missing_tensor", name, "the config needs it, no shard holds it", "restore it from the source")
    for name in sorted(weights - expected.keys()):
        if name == "lm_head.weight" or families.is_mtp(name, config):
            continue
        if families.STALE_BUFFER.search(name):
            report.warn("buffer_in_shard", name, "a buffer the model computes itself", f"{REPAIR} --drop")
        else:
            problem = f"no {config['model_type']} model with this config has such a tensor"
            report.error("unexpected_tensor", name, problem, "compare with the source by `ckpt diff`")
    for name in sorted(expected.keys() & weights):
        if tensors[name].shape != expected[name]:
            problem = f"shape {list(tensors[name].shape)}, the config needs {list(expected[name])}"
            report.error("wrong_shape", name, problem, "config.json and weights are of different models")


def _check_layers(weights: set[str], config: dict, report: Report) -> None:
    """Generic counts, for families without a table: every layer there, every MoE layer with all its experts."""
    layers = families.layer_count(config)
    if layers is None:
        return
    found = {layer for name in weights if (layer := families.layer_of(name)) is not None}
    if not found:
        return
    report.facts["layers"] = len({layer for layer in found if layer < layers})
    for layer in sorted(set(range(min(layers, 10_000))) - found):
        report.error(
            "missing_layer", f"layer {layer}", f"config.json has {layers} layers, no shard holds it", COPY_AGAIN
        )
    beyond = sorted(layer for layer in found if layer >= layers)
    mtp = families.mtp_layers(config)
    if extra := [layer for layer in beyond if layer >= layers + mtp]:
        problem = f"layers {extra[:5]} lie beyond num_hidden_layers {layers} + num_nextn_predict_layers {mtp}"
        report.error("extra_layer", "config.json", problem, f"{REPAIR} --mtp drop, or correct config.json")
    if mtp and not beyond and not any(name.startswith("mtp.") for name in weights):
        problem = f"num_nextn_predict_layers is {mtp}, the shards hold no MTP layer; mbridge would build and miss it"
        report.warn("mtp_absent", "config.json", problem, f"{REPAIR} --mtp drop (sets it to 0)")
    _check_experts(weights, config, report)


def _check_experts(weights: set[str], config: dict, report: Report) -> None:
    experts = families.expert_count(config)
    by_layer: dict[str, set[int]] = defaultdict(set)
    for name in weights:
        if match := families.EXPERT.match(name):
            by_layer[match["stem"]].add(int(match["expert"][:9]))
    for stem, numbers in sorted(by_layer.items()):
        if experts and numbers != set(range(experts)):
            problem = f"experts of {len(numbers)} numbers up to {max(numbers)}, config.json has {experts}"
            report.error("experts", stem, problem, "restore the experts, or correct config.json")


def _check_dtype(checkpoint: Checkpoint, report: Report) -> None:
    config = checkpoint.config
    wanted = CONFIG_DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")))
    if wanted is None or quantization_of(config) is not None:
        return
    sizes: Counter = Counter()
    for header in checkpoint.headers.values():
        for tensor in header.tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
            if tensor.dtype != "F32" and tensor.name.endswith("e_score_correction_bias"):
                problem = f"stored as {tensor.dtype}: 256 biases near 10 become 5 different values, routing changes"
                report.warn("rounded_bias", tensor.name, problem, "take it from the source, where it is F32")
    if sizes and (most := sizes.most_common(1)[0][0]) != wanted:
        problem = f"config.json says {wanted}, most bytes are {most}"
        report.warn("dtype", checkpoint.path.name, problem, "correct torch_dtype in config.json")


def check_quantization(checkpoint: Checkpoint, report: Report) -> None:
    """FP8 weights, their scales and the config must agree; a BF16 checkpoint holds neither."""
    tensors, quantization = checkpoint.tensors(), quantization_of(checkpoint.config)
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3"]
    scales = [name for name in tensors if name.endswith(families.SCALE_SUFFIX)]
    method = str((quantization or {}).get("quant_method", ""))
    if not fp8:
        for name in scales:
            report.error("leftover_scale", name, "a scale in a checkpoint without FP8 weights", REPAIR)
        if method == "fp8" and tensors:
            problem = "quantization_config says fp8, the weights are not; engines refuse or misread them"
            report.error("stale_quantization", "config.json", problem, "remove quantization_config")
        return
    if not checkpoint.config or checkpoint.broken:
        return
    try:
        block = block_of(checkpoint.config)
    except Fault as fault:
        report.error("quantization", "config.json", str(fault), "engines cannot read these weights")
        return
    for kind, name, problem in quantization_problems(tensors, block):
        report.error(kind, name, problem, "restore the shard from the source")
