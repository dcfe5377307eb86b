"""The Flower mod that makes any ClientApp a compressed client.

    app = ClientApp(mods=[kimad_mod])

The user's `train` finds the model under "arrays" and its settings under "config", as from
any Flower strategy, and returns the trained model under "arrays" and its metrics under
"metrics" ("num-examples" among them). Everything else - settling, the byte budget, the
difference to the memory, compression, the durable pending reply - happens here.
Messages of other strategies pass through untouched. Apps made with client_fn are asked in
their own words (clients/legacy.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from numpy.typing import NDArray

from bandwidth import Estimate, Sample, make_estimator, uplink_budget_bytes
from bandwidth.estimators import from_dict, to_dict
from clients.isolation import seeded
from clients.legacy import instructions, is_legacy, result
from clients.slots import Sought, sought
from compression import (
    UP,
    Compressed,
    Decoded,
    Header,
    Layout,
    Scheme,
    Slot,
    compress,
    decode,
    difference,
    largest_step,
    parse_floors,
    tag4,
    too_large,
)
from compression.errors import LayoutError, ProtocolError, UpdateError
from protocol import (
    Assignment,
    Attempt,
    Entry,
    NodeReply,
    NodeRequest,
    Pending,
    Report,
    Store,
    is_ours,
    read_request,
    write_reply,
)
from protocol.messages import with_content
from protocol.records import ARRAYS, CONFIG
from protocol.store import FloatArray, default_root

CODINGS: Final = "dense,rice,seed"  # what this client can decode
NUM_EXAMPLES: Final = "num-examples"
STATE: Final = "state"  # the slot of the app's own Context.state
_ESTIMATE: Final = ("up_bps", "up_spread", "up_age_s", "up_samples", "up_source")
_STORED: Final = ("examples", "compute_s", "budget_bytes", "norm_sq", "error_sq", *_ESTIMATE)
R = TypeVar("R")


def kimad_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Answer one message of the Kimad strategy for every client it names; one append to disk for all of them."""
    if not message.has_content() or not is_ours(message.content):
        return call_next(message, context)
    started_s = time.perf_counter()
    request = read_request(message.content)
    answers: list[_Answer] = []
    name, durable = client_id(context), request.durability == "full"
    with Store(state_root(context), request.experiment, name, durable=durable) as store:
        if request.layout_json is not None:
            store.use(Layout.from_json(request.layout_json))
        try:
            for assignment in request.assignments:
                turn = _Turn(message, context, call_next, request, assignment, store, started_s)
                answers.append(_answer(turn, assignment.client or name))
        except BaseException:
            store.commit()  # what is settled stays settled, whatever the app's code does
            raise
        if request.forget:
            store.forget()
        else:
            store.commit()
    reply = NodeReply(
        request.experiment,
        tuple(a.report for a in answers),
        payloads={(a.report.client, a.report.part): a.payload for a in answers if a.payload is not None},
        metrics={a.report.client: a.metrics for a in answers if a.metrics},
    )
    return Message(write_reply(reply), reply_to=message)


def client_id(context: Context) -> str:
    """Stable id: "client-id" of the node's configuration, else its partition, else its node id."""
    for key in ("client-id", "partition-id"):
        if (value := context.node_config.get(key)) is not None:
            return str(value)
    return f"node-{context.node_id}"


def state_root(context: Context) -> Path:
    """Folder for client state: "state-dir" of the node's configuration, else the default."""
    configured = context.node_config.get("state-dir")
    return Path(str(configured)) if configured else default_root()


Metrics = Mapping[str, int | float | list[int] | list[float]]


@dataclass(frozen=True, slots=True)
class _Answer:
    report: Report
    payload: bytes | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True, slots=True)
class _Turn:
    """One client's turn at a message, with all that it needs."""

    message: Message
    context: Context
    call_next: ClientAppCallable
    request: NodeRequest
    assignment: Assignment
    store: Store
    started_s: float


def _answer(turn: _Turn, client: str) -> _Answer:
    """One client's part of a message: settle, and then what the message asks for."""
    request, assignment, store = turn.request, turn.assignment, turn.store
    about = Report(
        client=client,
        status="need-layout",
        incarnation=assignment.incarnation,
        round=assignment.round,
        part=assignment.part,
        codings=CODINGS,
        index=_int(turn.context.node_config.get("partition-id")),
        count=_int(turn.context.node_config.get("num-partitions")),
        max_bytes_per_day=_int(turn.context.node_config.get("max-bytes-per-day")),
    )
    if store.layout is None:
        return _Answer(about)
    if request.kind == "evaluate":
        return _evaluate(turn, store.layout, about)

    entry = store.entry(client)
    if request.kind == "hello":  # acknowledges nothing, so it settles nothing
        return _Answer(_known(replace(about, status="hello"), entry))
    if request.kind == "train":
        if entry.pending is not None and entry.pending.attempt == assignment.attempt:  # asked again
            return _stored(store, entry, entry.pending, about)
        newest = max(_order(entry.accepted), _order(entry.pending.attempt if entry.pending else None))
        if _order(assignment.attempt) <= newest:
            detail = f"a stale request, of {assignment.attempt}; the newest known is {newest}"
            return _Answer(_known(replace(about, status="refused", detail=detail), entry))
    if store.settle(entry, assignment.accepted, assignment.digest) == "lost":
        if (mirror := request.memories.get(client)) is None or assignment.digest is None:
            return _Answer(_known(replace(about, status="lost-memory"), entry))
        store.replace(entry, dense(store.layout, mirror), assignment.digest, assignment.accepted)
    store.pass_horizon(entry, assignment.horizon)
    _take_sample(store, entry, request, assignment)
    about = _known(_estimated(about, entry, request, assignment.now_s), entry)
    if request.kind == "settle":
        return _Answer(replace(about, status="settled"))
    return _train(turn, store.layout, entry, about)


def _stored(store: Store, entry: Entry, pending: Pending, about: Report) -> _Answer:
    """The reply that was stored for this very attempt, once more."""
    stored = pending.report
    report = replace(about, status="update", **stored["report"])
    return _Answer(_known(report, entry), store.payload(pending), stored["metrics"])


def _order(attempt: Attempt | None) -> tuple[int, int]:
    return (attempt.incarnation, attempt.round) if attempt is not None else (0, 0)


def _train(turn: _Turn, layout: Layout, entry: Entry, about: Report) -> _Answer:
    """Train with the user's code, then cut, encode and make pending what it changed."""
    assignment, store = turn.assignment, turn.store
    received = model_arrays(turn.request, layout)
    config = {**turn.request.config, "server-round": assignment.round, "seed": assignment.seed}
    _restore_state(turn.context, entry)
    training_s = time.perf_counter()
    content = _call_user(turn, received, config)
    now_s = time.perf_counter()
    compute_s = assignment.compute_s if assignment.compute_s is not None else now_s - training_s
    elapsed_s = assignment.compute_s if assignment.compute_s is not None else now_s - turn.started_s
    user_metrics = dict(_only(content.metric_records, "MetricRecord")) if content.metric_records else {}
    examples = _int(user_metrics.get(NUM_EXAMPLES))
    budget = budget_bytes(assignment, elapsed_s)
    about = replace(about, status="update", examples=examples, compute_s=compute_s, budget_bytes=budget)
    try:
        trained = {name: array.numpy() for name, array in _only(content.array_records, "ArrayRecord").items()}
        update, whole = _update(layout, received, trained)
        found = sought(layout, turn.request, update, store.h(entry), entry.slots)
        full = turn.request.full_start and entry.accepted is None
        compressed = _compress(layout, entry, found, whole, turn.request, assignment, None if full else budget, full)
    except (UpdateError, LayoutError) as error:
        return _Answer(replace(about, status="refused", detail=str(error)), metrics=user_metrics)
    about = replace(about, norm_sq=sum(compressed.norm_sq), error_sq=sum(compressed.error_sq))
    numbers = {name: getattr(about, name) for name in _STORED if getattr(about, name) is not None}
    store.pend(
        entry,
        assignment.attempt,
        compressed.payload,
        compressed.updates,
        report={"report": numbers, "metrics": user_metrics},
        slots=_state(turn.context, entry) | found.after(compressed.updates),
        rate=1.0 if full else turn.request.memory_rate,
    )
    return _Answer(about, compressed.payload, user_metrics)


def _state(context: Context, entry: Entry) -> dict[str, bytes]:
    """The app's own Context.state as a slot's next generation; nothing where the app keeps none."""
    state = recorddict_to_proto(context.state).SerializeToString(deterministic=True) if context.state else b""
    return {STATE: state} if state or STATE in entry.slots else {}


def _restore_state(context: Context, entry: Entry) -> None:
    """Give the app the Context.state that belongs to its memory, not the one a lost reply or a dead process left."""
    stored = entry.slots.get(STATE)
    context.state = RecordDict() if stored is None else recorddict_from_proto(ProtoRecordDict.FromString(stored))


def budget_bytes(assignment: Assignment, elapsed_s: float) -> int | None:
    """The client's own budget, c = B (t - elapsed - a), within the server's cap; None: nothing is cut."""
    if assignment.rate_bps is None or assignment.time_budget_s is None:
        return assignment.cap_bytes
    return uplink_budget_bytes(
        assignment.rate_bps, assignment.time_budget_s, elapsed_s, assignment.overhead_s, assignment.cap_bytes
    )


def model_arrays(request: NodeRequest, layout: Layout) -> dict[str, NDArray[np.generic]]:
    """The model in a request's downlink blob, by name and in its shapes."""
    if request.model is None:
        raise ProtocolError("bad-record", f"a {request.kind} without a model")
    decoded = decode(layout, request.model)
    if len(decoded.whole) != len(layout.whole):
        raise ProtocolError("bad-record", "the downlink is not a whole model")
    return layout.join(dense(layout, decoded), decoded.whole)


def dense(layout: Layout, blob: bytes | Decoded) -> list[FloatArray]:
    """The flat compressed layers of a blob that leaves nothing out."""
    decoded = blob if isinstance(blob, Decoded) else decode(layout, blob)
    flat = [update.values for update in decoded.updates if update is not None and update.indices is None]
    if len(flat) != len(layout.compressed):
        raise ProtocolError("bad-record", "the downlink leaves out a part of the model")
    return flat


def _update(
    layout: Layout, received: Mapping[str, NDArray[np.generic]], trained: Mapping[str, NDArray[np.generic]]
) -> tuple[list[FloatArray], dict[str, NDArray[np.generic]]]:
    """(u = received - trained, flat; the arrays that travel whole)."""
    trained = _in_the_models_width(layout, trained)
    layout.check(trained)
    before, _ = layout.split(received)
    after, whole = layout.split(trained)
    return [difference(b, a) for b, a in zip(before, after, strict=True)], whole


def _compress(
    layout: Layout,
    entry: Entry,
    found: Sought,
    whole: Mapping[str, NDArray[np.generic]],
    request: NodeRequest,
    assignment: Assignment,
    budget: int | None,
    full: bool,
) -> Compressed:
    """C of what is to be sent, as payload bytes within the budget; all of it where `full`."""
    header = Header(
        kind=UP,
        layout_digest=layout.digest,
        experiment=tag4(request.experiment),
        client=tag4(entry.client),
        incarnation=assignment.incarnation,
        round=assignment.round,
        part=assignment.part,
        parts=assignment.part_count,
        slots=((Slot.H, entry.digest),),
    )
    scheme = (
        Scheme(operator="identity")
        if full
        else Scheme(
            operator=request.operator,
            operator_args=request.operator_args,
            contractive=not request.unbiased,
            codec=request.codec,
            allocation=request.allocation,
            values=request.values,
            ratio=request.ratio,
            floor=request.floor,
            floors=parse_floors(request.floors),
            errors=request.errors,
            unit=request.unit,
        )
    )
    sent_whole = whole if assignment.send_whole else None
    compressed = compress(layout, header, found.deltas, sent_whole, scheme, budget, seed=assignment.seed)
    for position, update in zip(layout.compressed, compressed.updates, strict=True):
        if too_large(update):
            layer = layout.layers[position]
            raise UpdateError(layer.name, None, f"a value above {largest_step(layer.dtype):.2g}; scale the update down")
    return compressed


def _in_the_models_width(
    layout: Layout, trained: Mapping[str, NDArray[np.generic]]
) -> Mapping[str, NDArray[np.generic]]:
    """float32 and float64 in the model's own width: scikit-learn and NumPy widen what they train."""
    floats = {layer.name: layer.dtype for layer in layout.layers if layer.dtype in ("float32", "float64")}
    with np.errstate(over="ignore"):  # what overflows is refused as not finite
        return {
            name: array.astype(floats[name], copy=False)
            if name in floats and array.dtype.name in ("float32", "float64")
            else array
            for name, array in trained.items()
        }


def _call_user(
    turn: _Turn, arrays: Mapping[str, NDArray[np.generic]], config: Mapping[str, bool | int | float | str | bytes]
) -> RecordDict:
    """Hand the user's code an ordinary Flower message; give back what it returned."""
    message, call_next = turn.message, turn.call_next
    kind = message.metadata.message_type
    if of_client_fn := is_legacy(call_next):
        inner = instructions(kind, arrays, config)
    else:
        inner = RecordDict(
            {
                ARRAYS: ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()}),
                CONFIG: ConfigRecord(dict(config)),
            }
        )
    isolated = seeded(turn.assignment.seed) if turn.request.isolate_rng else nullcontext()
    with isolated:
        reply = call_next(with_content(message, inner), turn.context)
    if reply.has_error():
        raise ProtocolError("user-code", f"the app's own code failed: {reply.error.reason}")
    return result(kind, reply.content, list(arrays)) if of_client_fn else reply.content


def _evaluate(turn: _Turn, layout: Layout, about: Report) -> _Answer:
    """Evaluate with the user's code; no state moves."""
    content = _call_user(turn, model_arrays(turn.request, layout), turn.request.config)
    metrics = dict(_only(content.metric_records, "MetricRecord")) if content.metric_records else {}
    return _Answer(replace(about, status="evaluated", examples=_int(metrics.get(NUM_EXAMPLES))), metrics=metrics)


def _take_sample(store: Store, entry: Entry, request: NodeRequest, assignment: Assignment) -> None:
    """Feed the server's measurement of the last upload to the client's own estimator, once."""
    size, seconds, end_s = assignment.sample_bytes, assignment.sample_seconds, assignment.sample_end_s
    if size is None or seconds is None or end_s is None or end_s <= entry.last_sample_s:
        return
    sample = Sample("up", size, seconds, assignment.overhead_s, end_s, "simulated")
    method = make_estimator(request.estimator)
    state = from_dict(entry.estimators["up"]) if "up" in entry.estimators else method.init()
    store.learn(entry, {**entry.estimators, "up": to_dict(method.update(state, sample))}, end_s)


def _estimated(about: Report, entry: Entry, request: NodeRequest, now_s: float) -> Report:
    if "up" not in entry.estimators:
        return about
    method = make_estimator(request.estimator)
    estimate: Estimate | None = method.predict(from_dict(entry.estimators["up"]), now_s)
    if estimate is None:
        return about
    return replace(
        about,
        up_bps=estimate.rate_bps,
        up_spread=estimate.spread,
        up_age_s=estimate.age_s,
        up_samples=estimate.samples,
        up_source=estimate.source,
    )


def _known(about: Report, entry: Entry) -> Report:
    accepted = entry.accepted
    return replace(
        about,
        digest=entry.digest,
        accepted_incarnation=accepted.incarnation if accepted else 0,
        accepted_round=accepted.round if accepted else 0,
    )


def _only(records: Mapping[str, R], what: str) -> R:
    """The one record of its kind in the user's reply."""
    if len(records) != 1:
        raise ProtocolError(
            "user-code", f"the app's train returned {len(records)} {what}s ({', '.join(records)}), expected exactly one"
        )
    return next(iter(records.values()))


def _int(value: object) -> int | None:
    """A whole number, also when it is written as a float; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
