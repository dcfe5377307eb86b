"""Peers that fail, lie or come back: a fault costs its own message, and both ends stay equal."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from compression.errors import ConfigError, StateError
from protocol import NodeReply, read_reply, read_request, write_reply
from protocol.filesystem import LOCAL
from protocol.messages import outside_of_a_run
from strategies import InProcessGrid, Kimad, LinkSettings, Settings, SimulatedNetwork
from tests.apps import SIZE, LeastSquares, cut, grid_of, join, least_squares_app, read, record, settled_memories

LINKS = LinkSettings("constant", 4000, 4000, overhead_s=0.05, compute_s=0.2, seed=3)
BASE = Settings(experiment="t", seed=5, time_budget_s=1.0, initial_rate_bps=4000, values="fp64", forget=False)
CLIENTS = 3
Tamper = Callable[[int, int, NodeReply], NodeReply | None]  # node, count of its replies so far, reply


class TamperingGrid(InProcessGrid):
    """Nodes 1, 2, 3 are clients 0, 1, 2; every reply passes through `tamper`, None loses it."""

    tamper: Tamper | None = None

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        out: list[Message] = []
        for message in super().pull_messages(message_ids):
            node = message.metadata.src_node_id
            self.seen = {**getattr(self, "seen", {}), node: getattr(self, "seen", {}).get(node, -1) + 1}
            if self.tamper is None or message.has_error():
                out.append(message)
                continue
            changed = self.tamper(node, self.seen[node], read_reply(message.content))
            if changed is not None:
                message.content.clear()
                message.content.update(write_reply(changed))
                out.append(message)
        return out


class Run:
    def __init__(self, folder: Path, settings: Settings = BASE, app: ClientApp | None = None) -> None:
        self.folder, self.rows = folder, list[dict[str, Any]]()
        self.app = app or least_squares_app(LeastSquares.make(CLIENTS), 1e-3)
        grid = TamperingGrid.of_partitions(self.app, CLIENTS, {}, folder)
        assert isinstance(grid, TamperingGrid)
        self.grid = grid
        self.each_round: Callable[[int], None] = lambda number: None
        self.strategy = Kimad(settings, SimulatedNetwork(LINKS), on_round=self._on_round)

    def _on_round(self, row: dict[str, Any], _: dict[str, Any]) -> None:
        self.rows.append(row)
        self.each_round(row["round"])

    def start(self, rounds: int, timeout: float = 60.0) -> NDArray[np.float64]:
        result = self.strategy.start(
            grid=self.grid, initial_arrays=record(cut(np.ones(SIZE), "float64")), num_rounds=rounds, timeout=timeout
        )
        return join(read(result.arrays))

    def check_memories(self) -> None:
        """Both ends of every memory agree, and the sums are theirs."""
        memories = settled_memories(self.strategy, self.folder)
        total = np.zeros(SIZE)
        for client, memory in memories.items():
            total += (self.strategy.memory.client(client).weight or 0.0) * np.concatenate(memory.h).astype(np.float64)
        np.testing.assert_allclose(np.concatenate(self.strategy.memory.sums), total, rtol=1e-12, atol=1e-12)


def test_an_honest_restart_under_a_new_node_id_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def restart(number: int) -> None:
        if number == 2:
            context = run.grid.contexts.pop(2)
            run.grid.contexts[77] = context

    run.each_round = restart
    run.start(6)
    assert run.strategy.clients["1"].node_id == 77
    assert run.strategy.clients["1"].excluded is None
    assert "1" in run.rows[-1]["accepted"]
    assert run.strategy.counts == {}
    run.check_memories()


def test_a_clone_beside_the_living_one_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def clone(number: int) -> None:
        if number == 2:
            run.grid.contexts[77] = run.grid.contexts[2]

    run.each_round = clone
    run.start(5)
    assert run.strategy.clients["1"].node_id == 2
    assert run.strategy.counts["cloned-client"] == 1
    run.check_memories()


def test_a_train_message_run_twice_gives_the_stored_payload_again(tmp_path: Path) -> None:
    calls = 0

    def spoil(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        nonlocal calls
        calls += 1
        arrays["b"] = arrays["b"] + calls  # user code that is not reproducible
        return arrays

    run = Run(tmp_path, app=least_squares_app(LeastSquares.make(CLIENTS), 1e-3, spoil))
    sent: list[Message] = []
    push = run.grid.push_messages

    def spy(messages: Iterable[Message]) -> Iterable[str]:
        batch = list(messages)
        sent.extend(m for m in batch if read_request(m.content).kind == "train")
        return push(batch)

    run.grid.push_messages = spy  # type: ignore[method-assign]

    def again(number: int) -> None:
        message = sent[-1]
        node = message.metadata.dst_node_id
        replies = [
            read_reply(run.app(outside_of_a_run(message.content, node_id=node, message_type="train"), context).content)
            for context in [run.grid.contexts[node]] * 2
        ]
        assert replies[0].payloads == replies[1].payloads != {}
        assert replies[0].reports == replies[1].reports
        if number == 3:  # an older message, executed late, touches nothing
            late = next(m for m in sent if m.metadata.dst_node_id == node)
            stale = run.app(
                outside_of_a_run(late.content, node_id=node, message_type="train"), run.grid.contexts[node]
            ).content
            assert read_reply(stale).reports[0].status == "refused"
            assert "stale request" in str(read_reply(stale).reports[0].detail)

    run.each_round = again
    run.start(4)
    assert calls == 4 * CLIENTS
    assert run.strategy.counts == {}
    run.check_memories()


def test_a_node_that_does_not_answer_is_not_asked_again_until_it_does(tmp_path: Path) -> None:
    run = Run(tmp_path)
    held: list[NodeReply] = []

    def hold(node: int, count: int, reply: NodeReply) -> NodeReply | None:
        if (node, count) == (2, 2):  # the hello is 0, round 1 is 1
            held.append(reply)
            return None
        return reply

    run.grid.tamper = hold
    run.start(5, timeout=0.3)
    assert [row["participants"] for row in run.rows] == [3, 3, 2, 2, 2]
    assert run.rows[1]["refused"] == {"1": "no reply"}
    assert len(held) == 1


def test_a_node_that_owes_an_answer_is_not_asked_to_evaluate(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(BASE, evaluate="clients"))
    # node 2's replies: 0 hello, 1 and 2 the first round's training and evaluation, 3 the second round's training
    run.grid.tamper = lambda node, count, reply: None if (node, count) == (2, 3) else reply
    run.start(3, timeout=0.3)
    blob = run.rows[0]["downlink_bytes"] // 6
    assert [row["downlink_bytes"] // blob for row in run.rows] == [3 + 3, 3 + 2, 2 + 2]


@pytest.mark.parametrize("status", ["lost-memory", "update"])
def test_a_node_cannot_speak_for_another_nodes_client(tmp_path: Path, status: str) -> None:
    run = Run(tmp_path)

    def forge(node: int, count: int, reply: NodeReply) -> NodeReply:
        if node != 3 or count < 2:
            return reply
        other = replace(reply.reports[0], client="1", status=status)
        return replace(reply, reports=(other,), payloads={("1", 0): b"x"})

    run.grid.tamper = forge
    run.start(4)
    assert run.strategy.clients["1"].excluded is None
    assert "1" in run.rows[-1]["accepted"]
    assert run.strategy.counts == {"foreign": 3}
    run.grid.tamper = None
    run.check_memories()


def test_a_client_that_stands_twice_in_a_reply_is_refused_whole(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def double(node: int, count: int, reply: NodeReply) -> NodeReply:
        if (node, count) == (1, 2):
            return replace(reply, reports=(*reply.reports, replace(reply.reports[0], status="refused")))
        return reply

    run.grid.tamper = double
    run.start(4)
    assert run.strategy.counts == {"bad-record": 1}
    assert run.rows[1]["refused"] == {"0": "no reply"}
    assert "0" in run.rows[2]["accepted"]
    run.check_memories()


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda p: b"", "bad-payload", "magic"),
        (lambda p: p[:-1], "bad-payload", "checksum"),
        (lambda p: p[:30] + bytes([p[30] ^ 1]) + p[31:], "bad-payload", "checksum"),
        (lambda p: bytes(5_000_000), "update", "5000000 bytes, expected at most"),
        (lambda p: None, "update", "an update without its payload 0/1"),
    ],
)
def test_a_bad_payload_costs_that_message_only(
    tmp_path: Path, change: Callable[[bytes], bytes | None], kind: str, said: str
) -> None:
    run = Run(tmp_path)

    def spoil(node: int, count: int, reply: NodeReply) -> NodeReply:
        if (node, count) != (2, 2):
            return reply
        payload = change(reply.payloads["1", 0])
        return replace(reply, payloads={} if payload is None else {("1", 0): payload})

    run.grid.tamper = spoil
    run.start(5)
    assert run.strategy.counts == {kind: 1}
    assert said in run.rows[1]["refused"]["1"]
    assert run.rows[1]["round_s"] < 5
    assert "1" in run.rows[2]["accepted"]
    run.check_memories()


def test_a_payload_of_another_round_is_stale(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first: dict[tuple[str, int], bytes] = {}

    def replay(node: int, count: int, reply: NodeReply) -> NodeReply:
        if node == 2 and count == 1:
            first.update(reply.payloads)
        return replace(reply, payloads=first) if (node, count) == (2, 3) else reply

    run.grid.tamper = replay
    run.start(5)
    assert run.strategy.counts == {"stale-attempt": 1}
    run.check_memories()


def test_numbers_of_a_liar_do_not_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def lie(node: int, count: int, reply: NodeReply) -> NodeReply:
        if node != 2:
            return reply
        changed = replace(reply.reports[0], norm_sq=1e-300, error_sq=1e308, index=-5, count=2**62, examples=2**62)
        metrics = {client: {**m, "train_loss": float("nan")} for client, m in reply.metrics.items()}
        return replace(reply, reports=(changed,), metrics=metrics)

    run.grid.tamper = lie
    x = run.start(4)
    assert np.isfinite(x).all()
    assert run.strategy.counts == {"metric": 4}
    assert all(row["train_loss"] is not None for row in run.rows)


def test_enormous_updates_leave_the_model_as_it_was(tmp_path: Path) -> None:
    def blow_up(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {name: np.full_like(a, 1e150) for name, a in arrays.items()} if index == 1 else arrays

    app = least_squares_app(LeastSquares.make(CLIENTS), 1e-3, blow_up)
    run = Run(tmp_path, replace(BASE, server_lr=1e200), app)
    x = run.start(3)
    assert np.array_equal(x, np.ones(SIZE))
    assert run.strategy.counts["step"] == 3


def test_a_made_up_client_does_not_vote_in_an_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(BASE, evaluate="clients", target_accuracy=0.5))

    def stuff(node: int, count: int, reply: NodeReply) -> NodeReply:
        if node != 2 or reply.reports[0].status != "evaluated":
            return reply
        ghost = replace(reply.reports[0], client="zz", examples=2**60)
        return replace(reply, reports=(*reply.reports, ghost), metrics={"zz": {"accuracy": 1.0}, "1": {"loss": 1.0}})

    run.grid.tamper = stuff
    run.start(3)
    assert len(run.rows) == 3
    assert all(row["test_accuracy"] is None for row in run.rows)
    assert run.strategy.counts == {"foreign": 3}


def test_state_of_another_run_under_the_same_id_is_said_before_anything_runs(tmp_path: Path) -> None:
    Run(tmp_path).start(3)
    with pytest.raises(ConfigError, match="choose another experiment id"):
        Run(tmp_path).start(3)


def test_a_client_that_lost_its_folder_gets_its_memory_from_the_server(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def lose(number: int) -> None:
        if number == 2:
            shutil.rmtree(tmp_path / "run-t" / "node-1")

    run.each_round = lose
    run.start(6)
    assert ["1" in row["refused"] for row in run.rows] == [False, False, True, True, False, False]
    assert run.strategy.counts == {"need-layout": 1, "lost-memory": 1}
    assert run.rows[-1]["participants"] == 3
    run.check_memories()


def test_dense_bytes_are_exact_when_the_rounds_number_grows(tmp_path: Path) -> None:
    run = Run(tmp_path, replace(BASE, operator="identity"))
    run.start(130)
    assert [row["uplink_bytes"] for row in run.rows] == [row["uplink_dense_bytes"] for row in run.rows]


@pytest.mark.parametrize(("said", "weight"), [(100, 100.0), (100.0, 100.0), (None, 1.0), (0.5, 1.0)])
def test_weights_by_examples(tmp_path: Path, said: float | None, weight: float) -> None:
    run = Run(tmp_path, app=least_squares_app(LeastSquares.make(CLIENTS), 1e-3, examples={1: said}))
    run.start(2)
    assert run.strategy.memory.client("1").weight == weight
    assert run.strategy.memory.client("2").weight == 30.0
    assert run.strategy.counts["no-examples"] == (0 if weight == 100 else 1)


def test_links_do_not_depend_on_the_order_of_hellos(tmp_path: Path) -> None:
    found = []
    for turn, order in enumerate(("abc", "cab", "bca")):
        app = least_squares_app(LeastSquares.make(CLIENTS), 1e-3)
        configs: list[dict[str, bool | int | float | str]] = [
            {"client-id": name, "state-dir": str(tmp_path / str(turn))} for name in order
        ]
        strategy = Kimad(replace(BASE, min_clients=3), SimulatedNetwork(replace(LINKS, uplink_bps_max=9000)))
        strategy.start(InProcessGrid(app, configs), record(cut(np.ones(SIZE), "float64")), num_rounds=0)
        found.append({name: strategy.network.mean_up_bps(name) for name in "abc"})
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 3


def test_an_app_without_the_mod_is_told_so_before_anything_runs(tmp_path: Path) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise KeyError("arrays")

    grid = InProcessGrid.of_partitions(app, 2, {}, tmp_path)
    with pytest.raises(ConfigError, match=r"none of the 2 nodes said who it is.*mods=\[kimad_mod\]"):
        Kimad(BASE, SimulatedNetwork(LINKS)).start(grid=grid, initial_arrays=record(cut(np.ones(SIZE), "float64")))


def test_an_answer_in_another_float_width_is_taken_in_the_models(tmp_path: Path) -> None:
    problem = LeastSquares.make(3)

    def widen(index: int, number: int, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        return {name: array.astype("float64" if index else "float32") for name, array in arrays.items()}

    rows: list[dict[str, Any]] = []
    Kimad(BASE, SimulatedNetwork(LINKS), on_round=lambda row, _: rows.append(row)).start(
        grid=grid_of(least_squares_app(problem, 1e-3, widen), 3, tmp_path),
        initial_arrays=record(cut(np.ones(SIZE), "float32")),
        num_rounds=3,
    )
    assert all(not row["refused"] for row in rows)
    assert all(row["participants"] == 3 for row in rows)


def test_without_a_callback_each_round_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = Kimad(replace(BASE, experiment=""), SimulatedNetwork(LINKS))
    strategy.start(
        grid=grid_of(least_squares_app(LeastSquares.make(2), 1e-3), 2, tmp_path),
        initial_arrays=record(cut(np.ones(SIZE), "float64")),
        num_rounds=2,
    )
    lines = [r.message for r in caplog.records if r.message.startswith("round ")]
    assert len(lines) == 2
    assert "bytes up" in lines[1]
    assert "2 of 2 replies in" in lines[1]
    assert strategy.settings.experiment == "run"


def test_a_hello_that_failed_is_said_again_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.roster.HELLO_AGAIN_S", 0.0)
    run = Run(tmp_path)

    def not_at_first(node: int, count: int, reply: NodeReply) -> NodeReply:
        return replace(reply, experiment="another") if (node, count) == (2, 0) else reply

    run.grid.tamper = not_at_first
    run.start(1, timeout=5.0)
    assert run.rows[0]["accepted"] == ["0", "1", "2"]
    assert run.strategy.counts == {"foreign": 1}


def test_a_second_server_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "clients")
    run.strategy.state_dir = tmp_path / "server"
    run.strategy.state_dir.mkdir()
    with LOCAL.lock(tmp_path / "server" / "lock"), pytest.raises(StateError, match="another server is at work"):
        run.start(1)
    assert not run.rows
    run.start(1)
    assert len(run.rows) == 1
