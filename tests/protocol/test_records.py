"""Records: everything that goes in comes out, and nothing malformed does."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.app.message.recorddict import RecordDict
from hypothesis import given
from hypothesis import strategies as st

from compression.errors import ProtocolError
from protocol import (
    Assignment,
    NodeReply,
    NodeRequest,
    Report,
    Verdict,
    columns,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from protocol.records import CLIENTS, MESSAGE, PAYLOADS, STYPE, SUMS

FULL_ASSIGNMENT = Assignment(
    client="a",
    incarnation=3,
    round=7,
    part=1,
    part_count=4,
    accepted_incarnation=2,
    accepted_round=6,
    accepted_parts=5,
    digest=b"12345678",
    horizon_incarnation=1,
    horizon_round=2,
    seed=99,
    time_budget_s=2.5,
    rate_bps=1e6,
    overhead_s=0.1,
    cap_bytes=1000,
    compute_s=0.5,
    send_whole=False,
    sample_bytes=77,
    sample_seconds=0.7,
    sample_end_s=12.5,
    now_s=13.0,
)
FULL_REPORT = Report(
    client="a",
    status="update",
    detail="why",
    incarnation=3,
    round=7,
    part=1,
    digest=b"12345678",
    accepted_incarnation=2,
    accepted_round=6,
    examples=100,
    compute_s=0.5,
    budget_bytes=1000,
    norm_sq=4.0,
    error_sq=1.0,
    up_bps=1e6,
    up_spread=0.2,
    up_age_s=1.5,
    up_samples=3,
    up_source="kernel",
    down_bps=4e6,
    down_spread=0.1,
    down_age_s=2.5,
    down_samples=2,
    down_source="application",
    address="127.0.0.1:1234",
    codings="dense,rice",
    index=1,
    max_bytes_per_day=5_000_000,
    count=10,
)


@pytest.mark.parametrize("full", [FULL_ASSIGNMENT, FULL_REPORT])
def test_the_full_examples_leave_no_field_at_its_default(full: object) -> None:
    for field in fields(full):  # type: ignore[arg-type]
        assert getattr(full, field.name) != field.default, field.name


def test_request_survives_the_record() -> None:
    request = NodeRequest(
        kind="train",
        experiment="e",
        assignments=(FULL_ASSIGNMENT, Assignment("b")),
        model=b"blob",
        layout_json="{}",
        operator="identity",
        allocation="uniform",
        values="fp32",
        ratio=0.25,
        floor=2,
        floors="fc*=3",
        errors="plain",
        unit="coordinates",
        estimator="ewma",
        durability="full",
        isolate_rng=True,
        forget=True,
        config={"lr": 0.1, "name": "x", "n": 3, "flag": True},
        memories={"a": b"mirror", "b": b""},
    )
    assert read_request(write_request(request)) == request


def test_reply_survives_the_record() -> None:
    reply = NodeReply(
        experiment="e",
        reports=(FULL_REPORT, Report("b", "refused")),
        payloads={("a", 0): b"x", ("a", 1): b"yy", ("b/with slash", 0): b"z"},
        metrics={"a": {"loss": 0.5, "num-examples": 3}},
        verdicts=(Verdict("a", "accepted", 10, 1.5, 2.0, b"87654321"), Verdict("b", "late")),
        sums=(np.arange(3.0), np.zeros(0)),
    )
    got = read_reply(write_reply(reply))
    assert replace(got, sums=()) == replace(reply, sums=())
    assert [s.tolist() for s in got.sums] == [[0.0, 1.0, 2.0], []]


text = st.text(max_size=8)
assignments = st.builds(
    Assignment,
    client=text,
    incarnation=st.integers(0, 2**40),
    round=st.integers(0, 2**40),
    digest=st.none() | st.binary(min_size=8, max_size=8),
    cap_bytes=st.none() | st.integers(1, 2**50),
    rate_bps=st.none() | st.floats(0, 1e12),
    send_whole=st.booleans(),
    now_s=st.floats(0, 1e9),
)


@given(st.lists(assignments, min_size=1, max_size=5))
def test_columns_survive_the_record(items: list[Assignment]) -> None:
    assert columns.unpack(Assignment, columns.pack(items)) == tuple(items)


def broken(content: RecordDict, key: str, **changes: object) -> RecordDict:
    record = content.config_records[key]
    for name, value in changes.items():
        if value is None:
            del record[name]
        else:
            record[name] = value  # type: ignore[assignment]
    return content


@pytest.mark.parametrize(
    ("record", "changes", "kind"),
    [
        (MESSAGE, {"version": 3}, "version"),
        (MESSAGE, {"version": None}, "version"),
        (MESSAGE, {"experiment": 3}, "bad-record"),
        (CLIENTS, {"n": 0}, "bad-record"),
        (CLIENTS, {"n": 2}, "bad-record"),
        (CLIENTS, {"n": 10**9}, "bad-record"),
        (CLIENTS, {"client": None}, "bad-record"),
        (CLIENTS, {"client": [1]}, "bad-record"),
        (CLIENTS, {"status": ["nonsense"]}, "bad-record"),
        (CLIENTS, {"round": [0.5]}, "bad-record"),
        (CLIENTS, {"examples": ["many"]}, "bad-record"),
    ],
)
def test_malformed_reply_is_a_protocol_error(record: str, changes: dict[str, object], kind: str) -> None:
    content = broken(write_reply(NodeReply("e", (FULL_REPORT,))), record, **changes)
    with pytest.raises(ProtocolError) as caught:
        read_reply(content)
    assert caught.value.kind == kind


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_flowers_record_reports_the_payloads_bytes_and_its_key(size: int) -> None:
    content = write_reply(NodeReply("e", (FULL_REPORT,), payloads={("a", 0): bytes(size)}))
    assert content.array_records[PAYLOADS].count_bytes() == size + len("0/a")


@pytest.mark.parametrize(("index", "count"), [(-5, 10), (10, 10), (0, 2**62), (None, 3), (3, None)])
def test_a_partition_that_cannot_be_is_not_believed(index: int | None, count: int | None) -> None:
    report = replace(FULL_REPORT, index=index, count=count)
    got = read_reply(write_reply(NodeReply("e", (report,)))).reports[0]
    assert (got.index, got.count) == (None, None)


def test_bytes_that_are_no_array_are_refused() -> None:
    content = write_reply(NodeReply("e", (FULL_REPORT,)))
    content[SUMS] = ArrayRecord({"0": Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=b"garbage")})
    with pytest.raises(ProtocolError, match="no array"):
        read_reply(content)


@pytest.mark.parametrize("key", ["9" * 5000 + "/a", "a", "-1/a", "\u0663/a", "/a"])
def test_a_payload_key_that_is_not_part_and_client_is_refused(key: str) -> None:
    content = write_reply(NodeReply("e", (FULL_REPORT,)))
    content[PAYLOADS] = ArrayRecord({key: Array(dtype="uint8", shape=(1,), stype=STYPE, data=b"x")})
    with pytest.raises(ProtocolError, match="PART/CLIENT"):
        read_reply(content)


def test_payload_under_a_foreign_type_is_refused() -> None:
    content = write_reply(NodeReply("e", (FULL_REPORT,), payloads={("a", 1): b"x"}))
    content[PAYLOADS] = ArrayRecord({"1/a": Array(np.zeros(3))})
    with pytest.raises(ProtocolError, match=STYPE):
        read_reply(content)


def test_a_message_of_another_strategy_is_foreign() -> None:
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        read_reply(RecordDict({"config": ConfigRecord({"lr": 0.1})}))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_nonsense_numbers_of_a_peer_are_dropped_not_believed(bad: float) -> None:
    report = replace(FULL_REPORT, norm_sq=bad, compute_s=bad, examples=-5)
    got = read_reply(write_reply(NodeReply("e", (report,)))).reports[0]
    assert (got.norm_sq, got.compute_s, got.examples) == (None, None, None)
    assert got.error_sq == FULL_REPORT.error_sq
