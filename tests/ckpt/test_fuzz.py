"""Headers and indexes as hostile input: any bytes give a result or one Fault, never another exception, never a lie."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_checkpoints import deepseek

from ckpt_tools.errors import Fault
from ckpt_tools.header import BITS, Tensor, header_bytes, read_header
from ckpt_tools.index import parse_index
from ckpt_tools.verify import verify

FEW = settings(
    max_examples=int(os.environ.get("CKPT_FUZZ_EXAMPLES", 60)),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

names = st.one_of(st.text(max_size=12), st.sampled_from(["__metadata__", "a", "model.layers.0.w", "../x", "\x00"]))
numbers = st.one_of(st.integers(-2, 9), st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=3))
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from([*BITS, "F9", ""]), numbers),
        "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
        "data_offsets": st.one_of(st.lists(st.integers(0, 40), max_size=3), st.lists(numbers, max_size=3), numbers),
    },
)
documents = st.one_of(
    st.dictionaries(names, st.one_of(entries, numbers, st.dictionaries(names, numbers, max_size=3)), max_size=5),
    st.recursive(numbers, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)

CONFIG_KEYS = [
    *("num_hidden_layers", "n_routed_experts", "hidden_size", "vocab_size", "first_k_dense_replace", "n_group"),
    *("num_nextn_predict_layers", "moe_layer_freq", "q_lora_rank", "torch_dtype", "quantization_config"),
    *("architectures", "model_type", "tie_word_embeddings", "head_dim", "num_attention_heads"),
]


def write_file(folder: str, length: int, text: bytes, data: bytes) -> Path:
    path = Path(folder) / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def reference_accepts(path: Path) -> bool:
    """What the safetensors library itself says about the file."""
    try:
        with safetensors.safe_open(path, "np") as file:
            list(file.keys())
    except Exception:
        return False
    return True


def ours_accepts(path: Path) -> bool:
    try:
        read_header(path)
    except Fault as fault:
        assert "\n" not in str(fault)
        return False
    return True


@FEW
@given(content=documents, data=st.binary(max_size=40), wrong=st.integers(-3, 3))
@example(content={"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, data=bytes(8), wrong=0)
@example(content={"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 0]}}, data=b"", wrong=0)
@example(content={"a": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}, data=b"", wrong=0)
@example(content={"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40, 0], "data_offsets": [0, 0]}}, data=b"", wrong=0)
@example(content={"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, data=b"", wrong=0)
def test_what_we_accept_the_library_accepts_too(content, data, wrong):
    """We may be stricter than the library, never laxer: what passes here must load there."""
    text = json.dumps(content).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(folder, max(0, len(text) + wrong), text, data)
        if ours_accepts(path):
            assert reference_accepts(path)


@FEW
@given(length=st.one_of(st.integers(0, 60), st.integers(0, 2**64 - 1)), rest=st.binary(max_size=80))
def test_any_bytes_give_a_result_or_one_fault(length, rest):
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(folder, length, rest, b"")
        if ours_accepts(path):
            assert reference_accepts(path)


dtypes = st.sampled_from(["F64", "F32", "BF16", "F16", "I8", "BOOL", "F8_E4M3", "U16"])
plain_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(lambda n: n[:2] != "__")


@FEW
@given(st.dictionaries(plain_names, st.tuples(dtypes, st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_what_we_write_the_library_reads_and_so_do_we(layout):
    tensors, position = [], 0
    for name, (dtype, shape) in sorted(layout.items(), key=lambda item: -BITS[item[1][0]]):
        size = BITS[dtype] // 8
        for length in shape:
            size *= length
        tensors.append(Tensor(name, dtype, tuple(shape), position, position + size))
        position += size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(header_bytes(tensors, {"format": "pt"}) + bytes(position))
        assert read_header(path).tensors == {tensor.name: tensor for tensor in tensors}
        with safetensors.safe_open(path, "pt") as file:
            assert set(file.keys()) == set(layout)
            assert file.metadata() == {"format": "pt"}


@FEW
@given(st.one_of(st.binary(max_size=60), documents.map(lambda d: json.dumps({"weight_map": d}).encode())))
@example(b'{"weight_map": ' + b"[" * 100_000)
@example(b'{"weight_map": {"\\ud800": "a"}}')
@example(b'{"weight_map": {"a": ' + b"9" * 5000 + b"}}")
def test_any_index_gives_a_weight_map_or_one_fault(text):
    try:
        index = parse_index(text, Path("index.json"))
    except Fault as fault:
        assert "\n" not in str(fault)
    else:
        assert all(isinstance(part, str) for item in index.weight_map.items() for part in item)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return deepseek(tmp_path_factory.mktemp("fuzz") / "model")


@FEW
@given(data=st.data())
def test_one_damaged_byte_of_a_header_or_index_never_crashes_verify(model, data):
    file = data.draw(st.sampled_from(sorted(path.name for path in model.glob("*.s*") if path.is_file())))
    path = model / file
    sound = path.read_bytes()
    limit = len(sound) if file.endswith("json") else read_header(path).data_start
    position, value = data.draw(st.integers(0, limit - 1)), data.draw(st.integers(0, 255))
    try:
        path.write_bytes(sound[:position] + bytes([value]) + sound[position + 1 :])
        report = verify(model)
        assert all("\n" not in str(finding) for finding in report.findings)
    finally:
        path.write_bytes(sound)


@FEW
@given(
    st.dictionaries(
        st.sampled_from(CONFIG_KEYS),
        st.one_of(numbers, st.lists(numbers, max_size=3), st.dictionaries(names, numbers, max_size=2)),
        max_size=4,
    )
)
def test_no_config_crashes_verify(model, changes):
    path = model / "config.json"
    sound = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(sound) | changes))
        verify(model)
    finally:
        path.write_text(sound)
