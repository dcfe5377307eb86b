"""What both ends say to each other: protocol version 1, field by field.

One Flower message goes to a node and one comes back. A node hosts one client (deployment)
or many (a cohort), so everything about a client is a column (columns.py). Bulk arrays are
packed blobs of the wire format (compression/wire.py); this module holds what goes around
them. docs/protocol.md describes every field; fields are only ever added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from compression.errors import ProtocolError
from protocol import columns

S = TypeVar("S")

PROTOCOL_VERSION: Final = 2
MOST_PARTITIONS: Final = 10_000_000
STYPE: Final = "kimad.v1"  # marks an Array whose data is a blob of the wire format

# Keys of the records in a Flower message.
MESSAGE: Final = "kimad"  # ConfigRecord: NodeRequest or NodeReply without its lists
CLIENTS: Final = "kimad.clients"  # ConfigRecord: columns of Assignment or Report
MODEL: Final = "kimad.model"  # ArrayRecord: the downlink blob
PAYLOADS: Final = "kimad.payloads"  # ArrayRecord: one blob for each client and part
MEMORIES: Final = "kimad.memories"  # ArrayRecord: one blob for each client whose memory is lost
VERDICTS: Final = "kimad.verdicts"  # ConfigRecord: columns of Verdict (cohorts)
SUMS: Final = "kimad.sums"  # ArrayRecord: float64 weighted sums (cohorts)
METRICS: Final = "kimad.metrics/"  # MetricRecord for each client: what the user's code returned
ARRAYS, CONFIG, USER_METRICS = "arrays", "config", "metrics"  # Flower's own names for user code

REQUEST_KINDS: Final = ("hello", "train", "evaluate", "settle")
STATUSES: Final = ("hello", "update", "evaluated", "settled", "refused", "lost-memory", "need-whole", "need-layout")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request to one client, and the only thing a reply to it may answer.

    Args:
        incarnation: how often the server has been started on this run; from 1.
        round: round of the run; from 1.
        client: stable client id.
        part: which part of the update, from 0; parts of one update share the rest.
    """

    incarnation: int
    round: int
    client: str
    part: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one message asks of one client, and what the server already took from it.

    Args:
        client: client id; "" in a hello, where the node answers with its id.
        incarnation: server incarnation of this attempt.
        round: round of this attempt.
        part: first part asked for; part_count parts exist.
        part_count: P, how many parts the update may be cut into.
        accepted_incarnation: incarnation of the last attempt accepted; 0 if none.
        accepted_round: its round; 0 if none.
        accepted_parts: bit i is set when its part i was accepted.
        digest: digest of slot h after it (chain.py); what the client must reach by settling.
        horizon_incarnation: incarnation of the oldest accepted attempt the server may return to.
        horizon_round: its round; 0: the start.
        seed: seed for the user's code in this round.
        time_budget_s: seconds of the round, from receipt to the reply's arrival.
        rate_bps: predicted uplink rate, bit/s.
        overhead_s: fixed seconds of an upload.
        cap_bytes: most bytes the reply may take, whatever the time left; None: no cap.
        compute_s: modelled compute seconds (simulated network); None: measure them.
        send_whole: whether arrays outside the memories travel in this round.
        sample_bytes: the server's measurement of this client's last upload: bytes,
        sample_seconds: its seconds, overhead included,
        sample_end_s: and the time at which it ended, on the run's clock; None: nothing new.
        now_s: the run's clock when the message was made.
    """

    client: str
    incarnation: int = 0
    round: int = 0
    part: int = 0
    part_count: int = 1
    accepted_incarnation: int = 0
    accepted_round: int = 0
    accepted_parts: int = 0
    digest: bytes | None = None
    horizon_incarnation: int = 0
    horizon_round: int = 0
    seed: int = 0
    time_budget_s: float | None = None
    rate_bps: float | None = None
    overhead_s: float = 0.0
    cap_bytes: int | None = None
    compute_s: float | None = None
    send_whole: bool = True
    sample_bytes: int | None = None
    sample_seconds: float | None = None
    sample_end_s: float | None = None
    now_s: float = 0.0

    @property
    def horizon(self) -> Attempt | None:
        """The oldest accepted attempt that the server may return to; None: the start."""
        if self.horizon_round == 0:
            return None
        return Attempt(self.horizon_incarnation, self.horizon_round, self.client)

    @property
    def attempt(self) -> Attempt:
        """The attempt that this assignment opens."""
        return Attempt(self.incarnation, self.round, self.client, self.part)

    @property
    def accepted(self) -> Attempt | None:
        """The last attempt the server accepted from this client, or None."""
        if self.accepted_round == 0:
            return None
        return Attempt(self.accepted_incarnation, self.accepted_round, self.client)


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """One message to a node.

    Args:
        kind: "hello" (who are you), "train", "evaluate" or "settle" (last words of a run).
        experiment: id of the run; state of another experiment is never touched.
        assignments: one for each of the node's clients that is asked.
        model: the downlink blob (train, evaluate), else None.
        layout_json: the layout (hello), else None; the blob names it by digest.
        operator, operator_args, codec, allocation, values, ratio, floor, errors, unit: how to compress
            (compression.Scheme).
        floors: floors of single layers, as compression.parse_floors reads them.
        estimator: name of the client's own rate estimator.
        method: what is compressed (clients/slots.py): "ef21", "ef21-sgdm" or "econtrol"; of others, "ef21".
        eta: of that method.
        unbiased: whether the operator is used in its unbiased form.
        memory_rate: how far an accepted reply moves the memory; 1 for EF21, alpha for DIANA.
        full_start: whether a client's first reply leaves nothing out and moves its memory by all of it.
        isolate_rng: whether the client seeds global random generators around the user's code.
        durability: "process" (a killed process loses nothing) or "full" (nor does a power cut).
        forget: in a settle: delete the state of this experiment.
        config: what the user's code finds under "config".
        memories: client to a blob of the wire format, dense: the server's mirror of a memory that was lost.
        version: protocol version.
    """

    kind: str
    experiment: str
    assignments: tuple[Assignment, ...]
    model: bytes | None = None
    layout_json: str | None = None
    operator: str = "topk"
    operator_args: str = ""
    codec: str = "portable"
    allocation: str = "hull"
    values: str = "auto"
    ratio: float | None = None
    floor: int = 1
    floors: str = ""
    errors: str = "squared"
    unit: str = "bytes"
    method: str = "ef21"
    eta: float = 1.0
    unbiased: bool = False
    memory_rate: float = 1.0
    full_start: bool = False
    estimator: str = "last"
    durability: str = "process"
    isolate_rng: bool = False
    forget: bool = False
    config: Mapping[str, bool | int | float | str | bytes] = field(default_factory=dict)
    memories: Mapping[str, bytes] = field(default_factory=dict)
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of one client.

    Args:
        client: client id.
        status: one of STATUSES; "update" comes with a payload.
        detail: why, for a refusal; capabilities stand in their own field.
        incarnation, round, part: the attempt answered.
        digest: digest of slot h after settling, before this reply.
        accepted_incarnation, accepted_round: the last attempt the client knows as accepted.
        examples: number of training examples, as the user's code reported it.
        compute_s: seconds of the user's code, modelled or measured.
        budget_bytes: the byte budget the client arrived at; None when nothing was cut.
        norm_sq, error_sq: ||u - h||^2 and ||C(u - h) - (u - h)||^2 over all layers.
        up_bps, up_spread, up_age_s, up_samples, up_source: the client's own uplink estimate.
        down_bps, down_spread, down_age_s, down_samples, down_source: and downlink estimate.
        address: local address of the client's connection, "ip:port"; None when unknown.
        codings: index codings the client can decode, comma-separated.
        index, count: partition of the data this client holds, and of how many; None: unknown.
        max_bytes_per_day: most bytes a day, both directions, that its link may carry; None: no limit.
    """

    client: str
    status: str
    detail: str | None = None
    incarnation: int = 0
    round: int = 0
    part: int = 0
    digest: bytes | None = None
    accepted_incarnation: int = 0
    accepted_round: int = 0
    examples: int | None = None
    compute_s: float | None = None
    budget_bytes: int | None = None
    norm_sq: float | None = None
    error_sq: float | None = None
    up_bps: float | None = None
    up_spread: float | None = None
    up_age_s: float | None = None
    up_samples: int | None = None
    up_source: str | None = None
    down_bps: float | None = None
    down_spread: float | None = None
    down_age_s: float | None = None
    down_samples: int | None = None
    down_source: str | None = None
    address: str | None = None
    codings: str | None = None
    index: int | None = None
    count: int | None = None
    max_bytes_per_day: int | None = None

    @property
    def attempt(self) -> Attempt:
        """The attempt that this report answers."""
        return Attempt(self.incarnation, self.round, self.client, self.part)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a cohort's node decided for one of its clients (reserved for cohorts).

    Args:
        client: client id.
        verdict: "accepted", "late", "refused" or "lost".
        payload_bytes: len(payload), sent or not.
        finish_s: when it arrived, on the run's clock.
        weight: weight with which it entered the sums.
        digest: digest of slot h after it.
    """

    client: str
    verdict: str
    payload_bytes: int = 0
    finish_s: float = 0.0
    weight: float = 0.0
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class NodeReply:
    """One message back from a node.

    Args:
        experiment: id of the run.
        reports: one for each assignment answered.
        payloads: (client, part) to payload bytes.
        metrics: client to what the user's code returned under "metrics".
        verdicts: of a cohort's clients; empty for a node of one client.
        sums: a cohort's weighted sums, float64, one array a compressed layer; else empty.
        version: protocol version.
    """

    experiment: str
    reports: tuple[Report, ...]
    payloads: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, int | float | list[int] | list[float]]] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    sums: tuple[NDArray[np.float64], ...] = ()
    version: int = PROTOCOL_VERSION


def is_ours(content: RecordDict) -> bool:
    """Whether a message's content is of this protocol."""
    return MESSAGE in content.config_records


def _blob(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)


def _unblob(array: Array | None, where: str) -> bytes:
    if array is None:
        raise ProtocolError("bad-record", f"{where} holds no blob")
    if array.stype != STYPE or not isinstance(array.data, bytes):
        raise ProtocolError("bad-record", f"{where} has stype {array.stype!r}, expected {STYPE!r}")
    return array.data


_REQUEST_SCALARS: Final[dict[str, type]] = {
    "kind": str,
    "experiment": str,
    "operator": str,
    "allocation": str,
    "values": str,
    "floor": int,
    "errors": str,
    "unit": str,
    "estimator": str,
    "durability": str,
    "forget": bool,
}
_OPTIONAL_SCALARS: Final[dict[str, type]] = {  # written where they are not the default
    "codec": str,
    "floors": str,
    "operator_args": str,
    "isolate_rng": bool,
    "method": str,
    "eta": float,
    "unbiased": bool,
    "memory_rate": float,
    "full_start": bool,
}


def write_request(request: NodeRequest) -> RecordDict:
    """A NodeRequest as the content of a Flower message."""
    head = ConfigRecord({"version": request.version})
    for name in _REQUEST_SCALARS:
        head[name] = getattr(request, name)
    if request.ratio is not None:
        head["ratio"] = request.ratio
    plain = NodeRequest(request.kind, request.experiment, ())
    for name in _OPTIONAL_SCALARS:
        if (value := getattr(request, name)) != getattr(plain, name):
            head[name] = value
    if request.layout_json is not None:
        head["layout"] = request.layout_json
    content = RecordDict({MESSAGE: head, CLIENTS: columns.pack(request.assignments)})
    if request.model is not None:
        content[MODEL] = ArrayRecord({"model": _blob(request.model)})
    if request.memories:
        content[MEMORIES] = ArrayRecord({client: _blob(data) for client, data in request.memories.items()})
    content[CONFIG] = ConfigRecord(dict(request.config))
    return content


def _head(content: RecordDict) -> ConfigRecord:
    if not is_ours(content):
        raise ProtocolError("foreign", f"record {MESSAGE!r} is missing: not a message of this protocol")
    head = content.config_records[MESSAGE]
    if (version := head.get("version")) != PROTOCOL_VERSION:
        raise ProtocolError(
            "version", f"peer speaks protocol {version!r}, this end {PROTOCOL_VERSION}; upgrade the older of the two"
        )
    if CLIENTS not in content.config_records:
        raise ProtocolError("bad-record", f"record {CLIENTS!r} is missing")
    return head


def _scalar(head: ConfigRecord, name: str, kind: type[S]) -> S:
    value = head.get(name)
    if type(value) is not kind:
        raise ProtocolError("bad-record", f"{name} is {value!r}, expected {kind.__name__}")
    return value


def read_request(content: RecordDict) -> NodeRequest:
    """The NodeRequest in a Flower message's content.

    Raises:
        ProtocolError: not of this protocol or version, or a field is missing or wrong.
    """
    head = _head(content)
    scalars: dict[str, object] = {name: _scalar(head, name, kind) for name, kind in _REQUEST_SCALARS.items()}
    scalars |= {name: _scalar(head, name, kind) for name, kind in _OPTIONAL_SCALARS.items() if name in head}
    request = NodeRequest(
        assignments=columns.unpack(Assignment, content.config_records[CLIENTS]),
        model=_unblob(content.array_records[MODEL].get("model"), MODEL) if MODEL in content.array_records else None,
        layout_json=_scalar(head, "layout", str) if "layout" in head else None,
        ratio=_scalar(head, "ratio", float) if "ratio" in head else None,
        config=dict(content.config_records.get(CONFIG, ConfigRecord())),  # type: ignore[arg-type]
        memories={c: _unblob(a, MEMORIES) for c, a in content.array_records.get(MEMORIES, ArrayRecord()).items()},
        **scalars,  # type: ignore[arg-type]
    )
    if request.kind not in REQUEST_KINDS:
        raise ProtocolError("bad-record", f"kind is {request.kind!r}, expected one of {', '.join(REQUEST_KINDS)}")
    return request


def write_reply(reply: NodeReply) -> RecordDict:
    """A NodeReply as the content of a Flower message."""
    head = ConfigRecord({"version": reply.version, "experiment": reply.experiment})
    content = RecordDict({MESSAGE: head, CLIENTS: columns.pack(reply.reports)})
    if reply.payloads:
        blobs = {f"{part}/{client}": _blob(data) for (client, part), data in reply.payloads.items()}
        content[PAYLOADS] = ArrayRecord(blobs)
    for client, metrics in reply.metrics.items():
        content[METRICS + client] = MetricRecord(dict(metrics))
    if reply.verdicts:
        content[VERDICTS] = columns.pack(reply.verdicts)
    if reply.sums:
        blobs = {str(i): Array(np.ascontiguousarray(s, dtype="<f8")) for i, s in enumerate(reply.sums)}
        content[SUMS] = ArrayRecord(blobs)
    return content


def read_reply(content: RecordDict) -> NodeReply:
    """The NodeReply in a Flower message's content. Nothing in it is trusted yet.

    Raises:
        ProtocolError: not of this protocol or version, or a field is missing or wrong.
    """
    head = _head(content)
    reports = columns.unpack(Report, content.config_records[CLIENTS])
    for report in reports:
        if report.status not in STATUSES:
            raise ProtocolError("bad-record", f"status is {report.status!r}, expected one of {', '.join(STATUSES)}")
    payloads: dict[tuple[str, int], bytes] = {}
    for key, array in content.array_records.get(PAYLOADS, ArrayRecord()).items():
        part, slash, client = key.partition("/")
        if not slash or not part.isascii() or not part.isdigit() or len(part) > 9:
            raise ProtocolError("bad-record", f"payload key {key[:40]!r} is not PART/CLIENT")
        payloads[client, int(part)] = _unblob(array, PAYLOADS)
    metrics = {
        key.removeprefix(METRICS): dict(record)
        for key, record in content.metric_records.items()
        if key.startswith(METRICS)
    }
    verdicts = columns.unpack(Verdict, content.config_records[VERDICTS]) if VERDICTS in content.config_records else ()
    return NodeReply(
        experiment=_scalar(head, "experiment", str),
        reports=tuple(_sane(r) for r in reports),
        payloads=payloads,
        metrics=metrics,
        verdicts=verdicts,
        sums=tuple(_sum(a) for a in content.array_records.get(SUMS, ArrayRecord()).values()),
    )


def _sum(array: Array) -> NDArray[np.float64]:
    if array.stype != "numpy.ndarray" or array.dtype != "float64":
        raise ProtocolError("bad-record", f"{SUMS} holds {array.stype}/{array.dtype}, expected float64 arrays")
    try:
        return np.asarray(array.numpy(), dtype=np.float64)  # np.load without pickle
    except Exception as error:  # whatever NumPy says of a peer's bytes
        raise ProtocolError("bad-record", f"{SUMS} holds bytes that are no array: {error}") from error


def _sane(report: Report) -> Report:
    """A report whose numbers are finite and not negative; anything else becomes None."""
    bad: dict[str, None] = {}
    for name in ("compute_s", "norm_sq", "error_sq", "up_spread", "up_age_s", "down_spread", "down_age_s"):
        value = getattr(report, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            bad[name] = None
    for name in ("examples", "budget_bytes", "max_bytes_per_day"):
        if (value := getattr(report, name)) is not None and value < 0:
            bad[name] = None
    index, count = report.index, report.count
    if index is None or count is None or not 0 <= index < count <= MOST_PARTITIONS:
        bad["index"] = bad["count"] = None
    return replace(report, **bad) if bad else report  # type: ignore[arg-type]
