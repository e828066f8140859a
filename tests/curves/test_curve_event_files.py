"""Event files as they are found: complete, damaged, cut, still growing (tensorboard#706, #4047, #5488)."""

from __future__ import annotations

import struct

import curve_assets as assets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atlasrl.curves import crc32c
from atlasrl.curves.load import RunReader, load
from atlasrl.curves.records import encode
from atlasrl.errors import Fault

POINTS = assets.points(1, 30)
INTACT = assets.event_bytes(POINTS, clock=1700000000)


def boundaries(data: bytes) -> list[int]:
    found, at = [0], 0
    while at < len(data):
        at += struct.unpack_from("<Q", data, at)[0] + 16
        found.append(at)
    return found


def folder_with(tmp_path, data: bytes):
    (tmp_path / "events.out.tfevents.1.host").write_bytes(data)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("data", "sum_"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)],
)
def test_crc32c_is_that_of_rfc_3720(data, sum_):
    assert int(crc32c.plain(np.frombuffer(data, np.uint8)[None])[0]) == sum_


def test_crc32c_of_long_and_single_strings_agree_with_the_byte_by_byte_definition():
    def reference(data):
        state = 0xFFFFFFFF
        for byte in data:
            state ^= byte
            for _ in range(8):
                state = state >> 1 ^ (crc32c.POLYNOMIAL if state & 1 else 0)
        state ^= 0xFFFFFFFF
        return ((state >> 15 | state << 17) + crc32c.MASK_DELTA) & 0xFFFFFFFF

    rng = np.random.default_rng(0)
    for length in (0, 1, 7, 4096, 4097, 5000, 9215, 9216):
        data = rng.integers(0, 256, length, dtype=np.uint8)
        found = {int(crc32c.masked(data[None])[0]), crc32c.masked_of(data.tobytes())}
        assert found == {reference(data.tobytes())}, length


def test_every_point_comes_back_unsampled(tmp_path):
    """TensorBoard's EventAccumulator keeps 10 000 by default, its web page 1 000."""
    folder = folder_with(tmp_path, assets.event_bytes([("a", step, step / 7) for step in range(25_000)], clock=1000))
    assert len(load(folder).curves["a"]) == 25_000


def test_what_tensorboard_writes_is_read_as_tensorboard_reads_it(tmp_path):
    """Old scalars, TF2 scalars in tensors, several values in a record, strange tags, steps of any size, NaN."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_ndarray

    def simple(tag, value):
        return summary_pb2.Summary.Value(tag=tag, simple_value=value)

    def tensor(tag, **content):
        metadata = summary_pb2.SummaryMetadata(
            plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="scalars")
        )
        return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor_pb2.TensorProto(**content))

    steps = (0, 1, 127, 128, 16_383, 16_384, 2**31, 2**40)
    records = [(step, [simple("plain", step / 3)]) for step in steps]
    records += [
        (step, [simple("mehrere/ä", 1.0 * step), simple("x" * 150, float("nan")), simple("", 2.5)]) for step in steps
    ]
    float32, float64 = {"dtype": types_pb2.DT_FLOAT}, {"dtype": types_pb2.DT_DOUBLE}
    records += [(step, [tensor("tf2/content", tensor_content=struct.pack("<f", step), **float32)]) for step in steps]
    records += [(step, [tensor("tf2/value", float_val=[step / 9], **float32)]) for step in steps]
    records += [(step, [tensor("tf2/double", double_val=[step / 9], **float64)]) for step in steps]
    writer = EventFileWriter(str(tmp_path))
    for wall, (step, values) in enumerate(records):
        writer.add_event(event_pb2.Event(wall_time=wall, step=step, summary=summary_pb2.Summary(value=values)))
    writer.close()

    theirs = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0})
    theirs.Reload()
    expected = {tag: [(e.step, e.value) for e in theirs.Scalars(tag)] for tag in theirs.Tags()["scalars"]}
    for tag in theirs.Tags()["tensors"]:
        expected[tag] = [(e.step, make_ndarray(e.tensor_proto).item()) for e in theirs.Tensors(tag)]
    assert len(expected) == 7
    np.testing.assert_equal(assets.plain(load(str(tmp_path))), expected)


def test_a_flipped_bit_is_an_error_that_says_where_reading_stopped(tmp_path):
    """TensorBoard's reader stops there without a word: 5 points become 1."""
    bounds = boundaries(INTACT)
    record = 20
    data = bytearray(INTACT)
    data[bounds[record] + 30] ^= 1
    folder = folder_with(tmp_path, bytes(data))
    with pytest.raises(
        Fault, match=rf"stopped at byte {bounds[record]} of {len(INTACT)}: .*checksum.*--allow-truncated"
    ):
        load(folder)
    run = load(folder, allow_truncated=True)
    assert sum(len(curve) for curve in run.curves.values()) == record - 1  # the first record is the file version
    assert any(f"stopped at byte {bounds[record]}" in note for note in run.reading.notes)


def test_a_cut_tail_is_reported_and_everything_before_it_read(tmp_path):
    run = load(folder_with(tmp_path, INTACT[:-5]))
    assert sum(len(curve) for curve in run.curves.values()) == len(POINTS) - 1
    cut = len(INTACT) - 5 - boundaries(INTACT)[-2]
    assert any(f"last {cut} bytes are an unfinished record" in note for note in run.reading.notes)


def test_zeros_that_a_full_disk_left_are_damage_not_an_end(tmp_path):
    folder = folder_with(tmp_path, INTACT + bytes(64))
    with pytest.raises(Fault, match=f"stopped at byte {len(INTACT)} of {len(INTACT) + 64}"):
        load(folder)


def test_records_with_right_checksums_that_are_no_events_are_damage(tmp_path):
    with pytest.raises(Fault, match="1 records have a right checksum but are no events"):
        load(folder_with(tmp_path, INTACT + encode(b"\xff\xff\xff")))


def test_a_record_larger_than_a_chunk_is_read(tmp_path, monkeypatch):
    from atlasrl.curves import records

    monkeypatch.setattr(records, "CHUNK", 1000)
    image = encode(b"\x09" + bytes(8) + b"\x2a" + b"\xd0\x86\x03" + b"\x3a\xcc\x86\x03" + b"\x01" * 49_996)
    assert assets.plain(
        load(folder_with(tmp_path, INTACT[: boundaries(INTACT)[5]] + image + INTACT[boundaries(INTACT)[5] :]))
    )


def test_a_file_that_shrinks_while_it_is_read_is_damage(tmp_path):
    folder = folder_with(tmp_path, INTACT)
    reader = RunReader(folder)
    reader.update()
    folder_with(tmp_path, INTACT[:200])
    with pytest.raises(Fault, match="shrank"):
        reader.update()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_never_crashes_the_reader_and_never_shortens_a_curve_silently(tmp_path_factory, data):
    """Truncate, flip, append, cut out: a full curve, an error, or a note that says what is missing."""
    broken = bytearray(INTACT)
    kind = data.draw(st.sampled_from(["truncate", "flip", "append", "cut out", "swap"]))
    at = data.draw(st.integers(0, len(broken) - 1))
    if kind == "truncate":
        del broken[at:]
    elif kind == "flip":
        broken[at] ^= data.draw(st.integers(1, 255))
    elif kind == "append":
        broken += data.draw(st.binary(min_size=1, max_size=200))
    elif kind == "cut out":
        del broken[at : at + data.draw(st.integers(1, 100))]
    else:
        broken[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    folder = folder_with(tmp_path_factory.mktemp("broken"), bytes(broken))
    cut_between_records = (kind in ("truncate", "cut out") and len(broken) in boundaries(INTACT)) or kind == "cut out"
    for allow in (False, True):
        try:
            run = load(folder, allow_truncated=allow)
        except Fault as fault:
            assert "\n" not in str(fault)
            continue
        points = sum(len(curve) for curve in run.curves.values())
        assert points == len(POINTS) or run.reading.notes or cut_between_records


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payloads=st.lists(st.binary(max_size=90), max_size=6))
def test_any_payload_with_a_right_checksum_is_survived(tmp_path_factory, payloads):
    folder = folder_with(tmp_path_factory.mktemp("foreign"), INTACT + b"".join(map(encode, payloads)))
    run = load(folder, allow_truncated=True)
    assert sum(len(curve) for curve in run.curves.values()) >= len(POINTS)
