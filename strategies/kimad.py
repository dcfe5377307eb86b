"""The Kimad strategy: every client's message cut to its own measured bandwidth.

    strategy = Kimad(Settings(time_budget_s=2.0), SimulatedNetwork(LinkSettings()))
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=100)

A round, each step in a file of its own: choose clients (choose.py), predict their uplinks
(predict.py), send (send.py); the clients answer (clients/mod.py); the network delivers
(network.py), replies are checked and accepted (receive.py, memory.py), the model steps
(step.py), the row is written (row.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from bandwidth import smallest_time_budget_s
from compression import Decoded, Layout, dense_bytes_on_wire, idle_floors, smallest_bytes
from compression.errors import ConfigError, ProtocolError, StateError, WireError
from protocol import write_request
from protocol.filesystem import LOCAL, FileSystem, MemoryFileSystem
from strategies import snapshot
from strategies.allowance import Allowance
from strategies.asking import Asking, Stop
from strategies.checkpoint import Checkpoints
from strategies.choose import choose
from strategies.exchange import Answer, Asked, Exchange, message_for
from strategies.faulty import FaultyExchange
from strategies.memory import ServerMemory, Taken
from strategies.methods import Constants, engine, theory_step
from strategies.mirrors import Mirrors
from strategies.network import Network, Sent
from strategies.predict import Rates
from strategies.receive import Metrics, Receiver, Reply, coordinates
from strategies.roster import Client, Roster
from strategies.row import Round, line, row
from strategies.send import Sender
from strategies.settings import Settings
from strategies.step import FloatArray, ServerOptimizer, combine_whole

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
OnRound = Callable[[dict[str, Any], dict[str, Any]], None]
MOST_FAILURES = 6  # answers that a client may fail to give in a round before it is left out, with on_failure = retry
_log = logging.getLogger("flwr.kimad")


class Kimad(Strategy):
    """Flower strategy with bandwidth-adaptive compression and EF21 error feedback.

    Args:
        settings: every setting of the run.
        network: when replies arrive and by which clock (SimulatedNetwork).
        on_round: called with each round's row (docs/run-directory.md) and its wall times; None:
            a line a round goes to Flower's log.
        on_clients: called once, before the first round, with the number of clients expected.
        state_dir: folder of checkpoints and mirrors; None: they are in memory, and a killed run is lost.
        constants: of the task with so many clients, for server_step = theory.
        resume: go on from the newest checkpoint in state_dir, if there is one.
        on_resume: called before the first round with the number of rounds that are in it.
    """

    def __init__(
        self,
        settings: Settings,
        network: Network[Reply],
        *,
        on_round: OnRound | None = None,
        on_clients: Callable[[int], None] | None = None,
        constants: Callable[[int], Constants] | None = None,
        state_dir: Path | None = None,
        resume: bool = False,
        on_resume: Callable[[int], None] | None = None,
    ) -> None:
        self.settings, self.network, self.on_round, self.on_clients = settings, network, on_round, on_clients
        self.constants = constants
        self.state_dir, self.resume, self.on_resume = state_dir, resume, on_resume
        self.incarnation = 1
        self.server_lr = settings.server_lr
        self.checkpoints: Checkpoints
        self.rates = Rates(settings.estimator, settings.initial_rate_bps)
        self.allowance = Allowance(settings.max_bytes_per_day)
        self.layout: Layout
        self.arrays: dict[str, NDArray[np.generic]]
        self.memory: ServerMemory
        self.sender: Sender
        self.receiver: Receiver
        self.roster: Roster
        self.stepper: ServerOptimizer
        self._exchange: Exchange
        self.over = False
        self._round: Round

    @property
    def clients(self) -> dict[str, Client]:
        """The clients that said hello, by id."""
        return self.roster.clients

    @property
    def counts(self) -> Counter[str]:
        """Faults of peers by kind, and other things worth counting."""
        return self.receiver.counts + self.rates.counts

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds; as flwr.serverapp.strategy.Strategy.start.

        Args:
            grid: any Flower grid.
            initial_arrays: the model; its arrays decide the layout.
            num_rounds: most rounds; the run may stop earlier (target, stop_after_s).
            timeout: real seconds to wait for a round's replies.
            train_config: goes to every client's `train` under "config".
            evaluate_config: the same for `evaluate`.
            evaluate_fn: the server's evaluation, called every `evaluate_every` rounds.

        Raises:
            ConfigError: too few clients answered.
            LayoutError: the model's arrays cannot form a layout.
            StateError: another server holds the state's folder, or it cannot be read or written.
        """
        with self._alone():
            return self._run(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other server works on this run's folder meanwhile: one that lost its SuperLink may still be alive."""
        if self.state_dir is None:
            yield
            return
        with ExitStack() as stack:
            try:
                LOCAL.make_folder(self.state_dir, durable=True)
                stack.enter_context(LOCAL.lock(self.state_dir / "lock"))
            except StateError as error:
                raise StateError(
                    f"another server is at work in {self.state_dir}: wait for it, or stop its process, before going on"
                ) from error
            except OSError as error:
                raise StateError(f"{self.state_dir}: cannot be made ({error}); choose another run-dir") from error
            yield

    def _run(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int,
        timeout: float,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> Result:
        done = self._prepare(grid, initial_arrays)
        self.summary()
        result = Result(arrays=_record(self.arrays))
        finished = False
        try:
            with Stop(wanted=self.state_dir is not None) as stop:
                self.roster.wait_for_first(timeout)
                self._check_budget_rate()
                if self.on_clients is not None:
                    self.on_clients(self.roster.expected())
                if not done:
                    self._fix_numbers(self.roster.expected())
                self._warn_of_budgets()
                for number in range(done + 1, num_rounds + 1 if not self.over else 0):
                    begun_s = time.perf_counter()
                    self._train(number, result, grid, timeout, train_config or ConfigRecord(), stop)
                    trained_s = time.perf_counter()
                    if number % self.settings.evaluate_every == 0 or number == num_rounds:
                        self._evaluate(number, result, grid, timeout, evaluate_config or ConfigRecord(), evaluate_fn)
                    self._write_row(trained_s - begun_s, time.perf_counter() - begun_s)
                    self.over = self._is_over()
                    if stop.asked or self.over or number == num_rounds or self._is_due(number):
                        self._checkpoint(number)
                    stop.now(number)
                    if self.over:
                        break
            finished = True
        finally:
            if finished or self.state_dir is None:
                self._settle_all(grid, timeout)
        return result

    def _prepare(self, grid: Grid, initial_arrays: ArrayRecord) -> int:
        """Fix the layout and the starting model, make the parts of the round; rounds that are done already."""
        self.arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        self.layout = Layout.of(self.arrays, self.settings.whole)
        fs: FileSystem = LOCAL if self.state_dir is not None else MemoryFileSystem()
        folder = self.state_dir or Path("/server")
        self.checkpoints = Checkpoints(fs, folder)
        experiment = self.settings.experiment or _run_name(grid)
        experiment, self.incarnation = self.checkpoints.begin(experiment, resume=self.resume)
        self.settings = s = replace(self.settings, experiment=experiment)
        checkpoint = self.checkpoints.load() if self.resume else None
        if checkpoint is None:
            fs.remove(folder / "mirrors")
        elif checkpoint.plain["layout"] != self.layout.digest.hex():
            raise ConfigError(f"resume: the checkpoints in {folder} are of another model; choose another run-dir")
        mirrors = Mirrors(fs, folder / "mirrors", self.layout) if s.mirrors else None
        self.memory = ServerMemory(self.layout, s.experiment, mirrors, engine(s, self.layout))
        returns = self.state_dir is not None and s.checkpoint_every > 0
        horizon = self.checkpoints.horizon if returns else None
        self.sender = Sender(s, self.layout, self.memory, self.incarnation, horizon)
        self.receiver = Receiver(s.experiment, self.layout, self.memory, s.weights)
        flat, _ = self.layout.split(self.arrays)
        if idle := idle_floors(self.layout, s.scheme()):
            names = ", ".join(repr(self.layout.layers[at].name) for at in self.layout.compressed)
            raise ConfigError(f"floors: no compressed array is called like {', '.join(idle)}; there are {names}")
        self.stepper = self.optimizer(flat)
        self._exchange = FaultyExchange(grid, s.fault_plan(), s.seed) if s.faults else Exchange(grid)
        self.roster = Roster(grid, self._exchange, self.sender, self.receiver, self.network)
        done = 0
        if checkpoint is not None:
            snapshot.restore(self, checkpoint)
            done = checkpoint.round
            _log.info("going on after round %d, with checkpoint %s", done, folder)
        if self.resume and self.on_resume is not None:
            self.on_resume(done)
        return done

    def _is_due(self, number: int) -> bool:
        every = self.settings.checkpoint_every
        return every > 0 and number % every == 0

    def _checkpoint(self, number: int) -> None:
        """Keep everything as it is after a round; without a folder or without checkpoints, fold mirrors only."""
        mirrors = self.memory.mirrors
        if self.state_dir is None or self.settings.checkpoint_every == 0:
            if mirrors is not None:
                mirrors.fold(mirrors.number)
            return
        accepted = mirrors.checkpoint() if mirrors is not None else 0
        self.checkpoints.save(snapshot.take(self, number), self.memory.horizon(), accepted)
        if mirrors is not None:
            mirrors.fold(self.checkpoints.oldest_mirrors)

    def optimizer(self, flat: Sequence[FloatArray]) -> ServerOptimizer:
        """A fresh server optimiser of these parameters."""
        return self.settings.optimizer(list(flat), self.server_lr)

    def _dense_reply_bytes(self, round_: int) -> int:
        """What one reply of a round would take uncompressed on the same wire."""
        return dense_bytes_on_wire(self.layout, self.sender.header("", round_, slots=True))

    def summary(self) -> None:
        """Log what will be run."""
        s = self.settings
        cut = f"fixed ratio {s.ratio:g}" if s.ratio is not None else f"time budget {s.time_budget_s:g} s"
        _log.info(
            "Kimad: %s, %s, %s; %d arrays, %d of %d values in the memories, %d bytes dense on the wire",
            s.operator,
            s.allocation,
            "nothing is cut" if s.operator == "identity" else cut,
            len(self.layout.layers),
            self.layout.compressed_size,
            sum(layer.size for layer in self.layout.layers),
            self._dense_reply_bytes(1),
        )

    def _fix_numbers(self, clients: int) -> None:
        """The method's numbers for so many clients; they stay for the whole run.

        Raises:
            ConfigError: no step from theory.
        """
        s = self.settings
        self.memory.engine = engine(s, self.layout, clients)
        if s.server_step == "theory":
            if self.constants is None:
                raise ConfigError(
                    "server-step is 'theory', and the task does not give its constants: add a method smoothness(count) "
                    "(docs/tasks.md), or give server-lr and server-step = given"
                )
            gamma = theory_step(s, self.layout, self.constants(clients))
            self.server_lr = self.stepper.lr = gamma / s.update_scale
        e = self.memory.engine
        if s.method != "ef21" or s.server_step == "theory":
            _log.info(
                "%s: memories move by %.6g of a reply, the server by %.6g of the estimate",
                s.method,
                e.rate,
                self.server_lr,
            )

    def _check_budget_rate(self) -> None:
        """Refuse a budget rate that the network does not know.

        Raises:
            ConfigError: there is a client whose link is not known beforehand.
        """
        if self.settings.budget_rate == "estimated":
            return
        for client in self.clients:
            if self.sender.budget_rate_bps(client, self.network, self.rates, None) is None:
                raise ConfigError(
                    f"budget-rate is {self.settings.budget_rate!r}, and nobody knows the link of client {client!r} "
                    "beforehand: expected a simulated network, or budget-rate = estimated"
                )

    def _fewest_coordinates(self) -> int:
        """Values of the smallest reply, for unit = coordinates."""
        scheme = self.settings.scheme()
        return sum(scheme.floor_of(self.layout.layers[i]) for i in self.layout.compressed)

    def _warn_of_budgets(self) -> None:
        """Say at the start when the time budget cannot hold what must travel."""
        s = self.settings
        if s.operator == "identity" or s.ratio is not None:
            return
        smallest = self._smallest_reply_bytes(1) if s.unit == "bytes" else self._fewest_coordinates()
        whole = sum(self.layout.layers[i].nbytes for i in self.layout.whole)
        needed_s: list[float] = []
        for client in self.clients:
            rate = self.network.mean_up_bps(client) or s.initial_rate_bps
            compute_s, overhead_s = self.network.compute_s(client) or 0.0, self.network.overhead_up_s(client)
            needed_s.append(smallest_time_budget_s(rate, smallest, compute_s, overhead_s))
            room = max(0.0, (s.time_budget_s - compute_s - overhead_s) * rate / 8)
            if whole > room:
                _log.warning(
                    "client %s: arrays that travel whole take %d bytes and its budget is about %d: raise time-budget, "
                    "or set whole-every above %d",
                    *(client, whole, room, s.whole_every),
                )
        short = sum(t > s.time_budget_s for t in needed_s)
        if short:
            _log.warning(
                "time-budget is %g s: too short for the smallest message of %d of %d clients, which will send that "
                "message and miss it; the smallest workable value is %.4g",
                *(s.time_budget_s, short, len(needed_s), max(needed_s)),
            )

    # ---- training ----------------------------------------------------------------------

    def _train(self, number: int, result: Result, grid: Grid, timeout: float, config: ConfigRecord, stop: Stop) -> None:
        """Steps 1 to 5 of one round; it is given up, with everything kept as it was before, where a stop was asked."""
        self.roster.greet()
        self._gather(self.configure_train(number, result.arrays, config, grid), grid, timeout, stop)
        if stop.asked:  # nothing of this round has been taken in yet
            self._checkpoint(number - 1)
            stop.now(number - 1)
        arrays, metrics = self.aggregate_train(number, ())
        result.arrays = arrays or result.arrays
        if metrics is not None:
            result.train_metrics_clientapp[number] = metrics

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Steps 1 to 3: one message a chosen client, with the model, its attempt and its budget's inputs."""
        s = self.settings
        self._round = current = Round(server_round, self.network.now_s())
        under_way = self.network.under_way().items()
        may_not = {client for client, since_s in under_way if current.start_s - since_s < s.patience_s}
        may_not |= self.clients.keys() - self._reachable()
        blob = self.sender.model(self.arrays, server_round)
        used_up = self._used_up(len(blob) + self._smallest_reply_bytes(server_round)) - may_not
        draw = partial(choose, self.clients, fraction=s.fraction, seed=s.seed, round_=server_round, sampling=s.sampling)
        chosen = draw(may_not | used_up)
        if used_up and not chosen and draw(may_not):
            self.network.idle_until(self.allowance.next_day_s(current.start_s))
        messages: list[Message] = []
        for client in chosen:
            known = self.clients[client]
            assignment = self.sender.assignment(client, server_round, self.network, self.rates, known.report.up_bps)
            memories = self._lost_memory(client)
            current.sent_bytes[client] = len(blob) + sum(map(len, memories.values()))
            left = self.allowance.left(client, current.start_s)
            if left is not None:
                left = max(0, left - current.sent_bytes[client])
                assignment = replace(assignment, cap_bytes=min(left, assignment.cap_bytes or left))
            current.asked[client] = assignment
            if (rate_bps := self.network.true_up_bps(client)) is not None:
                current.true_up_bps[client] = rate_bps
            request = self.sender.request("train", (assignment,), model=blob, config=config, memories=memories)
            current.requests[client] = request
            messages.append(message_for(grid, write_request(request), "train", known.node_id))
        return messages

    def _lost_memory(self, client: str) -> dict[str, bytes]:
        """The mirror of a client that has lost its memory, to go with its next message."""
        mirror = self.sender.mirror(client, self._round.number) if self.clients[client].lost else None
        return {} if mirror is None else {client: mirror}

    # ---- asking ----------------------------------------------------------------------------

    def _gather(self, messages: Iterable[Message], grid: Grid, timeout: float, stop: Stop) -> None:
        """Send a round's messages and take the answers in, until all are there or nobody is waited for any more.

        With on_failure = retry a client that failed is asked the same again, on the node where it is
        then. Nothing of the server's state moves here, so that a round can be given up at any point.
        """
        ids = self._exchange.push("train", messages)
        asking = Asking(time.monotonic() + timeout)
        while not stop.asked:
            answers = self._exchange.poll()
            for answer in self.roster.take_hellos(answers):
                self._take(answer)
            if not (self._unanswered() if self.settings.on_failure == "retry" else self._exchange.waits_for(ids)):
                return
            now_s = time.monotonic()
            if now_s >= asking.until_s:
                return
            if asking.is_time_to_look(now_s):
                self.roster.greet()
                self._reachable()
            if self.settings.on_failure == "retry":
                again = [c for c in self._unanswered() if self._may_be_asked_again(c) and asking.may_try(c, now_s)]
                ids |= self._exchange.push("train", [self._same_again(client, grid) for client in again])
            time.sleep(asking.pause_s(bool(answers)))

    def _unanswered(self) -> list[str]:
        """Clients of this round that have neither replied nor refused."""
        current = self._round
        return [c for c in current.asked if c not in current.replies and c not in current.refused]

    def _may_be_asked_again(self, client: str) -> bool:
        node = self.clients[client].node_id
        owes = node in self._exchange.unanswered("train") or node in self._exchange.unanswered("hello")
        return not owes and client in self._reachable()

    def _same_again(self, client: str, grid: Grid) -> Message:
        """The same request to the same client, at the node where it is now, with its memory if that is lost."""
        request = replace(self._round.requests[client], memories=self._lost_memory(client))
        self._round.requests[client] = request
        return message_for(grid, write_request(request), "train", self.clients[client].node_id)

    def _used_up(self, needed_bytes: int) -> set[str]:
        """Clients that have fewer bytes left in this day than a round takes at least."""
        now_s = self._round.start_s
        for client, known in self.clients.items():
            self.allowance.limit(client, known.max_bytes_per_day)
        left = {client: self.allowance.left(client, now_s) for client in self.clients}
        return {client for client, nbytes in left.items() if nbytes is not None and nbytes < needed_bytes}

    def _smallest_reply_bytes(self, round_: int) -> int:
        """What one reply takes at least, whatever the budget says."""
        s = self.settings
        if s.operator == "identity":
            return self._dense_reply_bytes(round_)
        return smallest_bytes(self.layout, self.sender.header("", round_, slots=True), s.scheme())

    def _reachable(self) -> set[str]:
        """Clients that take part and whose node is there and owes no answer: one message a node."""
        silent = self._exchange.unanswered("train") | self._exchange.unanswered("evaluate")
        nodes = self.roster.online() - silent
        there = {c for c, client in self.clients.items() if client.excluded is None and client.node_id in nodes}
        return there - self.roster.claimed()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Step 5: let the network deliver the replies taken, accept them and step.

        `start` takes each reply as the answer to the message it was asked by; replies given
        here are taken as from the node they name.
        """
        current = self._round
        for message in replies:
            self._take(Answer(Asked("train", message.metadata.src_node_id), message))
        current.replies = dict(sorted(current.replies.items()))  # nothing may depend on the order of arrival
        current.refused = dict(sorted(current.refused.items()))
        for client, assignment in current.asked.items():
            self.network.withdraw(client)  # asking again closes the attempt before
            self.allowance.spend(client, current.sent_bytes[client], current.start_s)
            current.downlink_bytes += current.sent_bytes[client]
            self.receiver.open(assignment.attempt)
            if client not in current.replies:
                self.receiver.close(client)
                current.refused.setdefault(client, "no reply")
        for client, reply in current.replies.items():
            self.allowance.spend(client, len(reply.payload), current.start_s)
        sent = [Sent(client, self._carried(reply), reply) for client, reply in current.replies.items()]
        current.end = end = self.network.finish_round(sent, self.settings.deadline_s, self.settings.patience_s)
        arrived = sorted((*end.on_time, *end.from_before), key=lambda a: a.client)
        for item in arrived:
            self.rates.measured(item.client, item.transfer.sample)
        if self.settings.late == "drop":
            for item in end.late:
                self.receiver.close(item.client)
            arrived = list(end.on_time)
        in_time = {item.client for item in end.on_time}
        checked = [(item.reply, self._accept(item.reply, in_time=item.client in in_time)) for item in arrived]
        accepted = [(reply, taken) for reply, taken in checked if taken is not None]
        current.accepted = [reply.report.client for reply, _ in accepted]
        estimate = self.memory.take([taken for _, taken in accepted])
        if self.memory.mirrors is not None:
            self.memory.mirrors.flush()
        for client in self.roster.count_absent():
            if self.memory.leave(client):
                self.receiver.fault("left", f"client {client!r} is gone for {self.settings.leave_after} rounds")
        if not accepted:
            return None, None
        self._step(accepted, estimate)
        current.train_metrics = self._mean_metrics([reply for reply, _ in accepted])
        return _record(self.arrays), MetricRecord(dict(current.train_metrics))

    def _carried(self, reply: Reply) -> int:
        """What a link carries of a reply: its bytes, or its coordinates with unit = coordinates."""
        if self.settings.unit == "bytes" or not isinstance(reply.content, Decoded):
            return len(reply.payload)
        return coordinates(reply.content, everything=self.settings.operator == "identity")

    def _take(self, answer: Answer) -> None:
        """Take the answer to a train message of this round; others are counted and ignored."""
        current, node = self._round, answer.asked.node_id
        try:
            reply = self.receiver.read(answer.message, self.roster.on_node(node))
            updates, refusals = self.receiver.take(reply, current.asked)
        except ProtocolError as error:
            self.receiver.fault(error.kind, f"node {node}: {error.detail}")
            for client in self.roster.on_node(node) & current.asked.keys():
                current.failures[client] = current.failures.get(client, 0) + 1
                if current.failures[client] >= MOST_FAILURES:
                    current.refused.setdefault(client, f"failed {MOST_FAILURES} times: {error.detail}")
            return
        retry = self.settings.on_failure == "retry"
        current.replies.update(updates)
        for report in reply.reports:
            client = report.client
            known = self.clients[client]
            known.report = report
            if client not in refusals:
                known.lost = False
                continue
            self.receiver.fault(report.status, f"client {client!r}, round {current.number}: {refusals[client]}")
            if report.status == "need-layout":
                self.roster.greet_again(client)
            elif report.status == "lost-memory":
                if self.memory.mirrors is not None and client not in current.requests[client].memories:
                    known.lost = True
                    _log.warning("client %r has lost its memory; its next message brings the server's copy", client)
                else:
                    known.excluded = "its memory is lost"
                    _log.warning("client %r: its memory is not the one known here; it takes no further part", client)
            if not (retry and report.status in ("need-layout", "lost-memory") and known.excluded is None):
                current.refused[client] = refusals[client]

    def _accept(self, reply: Reply, *, in_time: bool) -> Taken | None:
        """Accept one arrived reply; None, counted and logged, if it is refused."""
        client = reply.report.client
        try:
            return self.receiver.accept(reply, in_time=in_time)
        except (WireError, ProtocolError) as error:
            kind = error.kind if isinstance(error, ProtocolError) else "bad-payload"
            self.receiver.fault(kind, f"client {client!r}, round {reply.report.round}: {error}")
            self._round.refused[client] = str(error)
            return None

    def _step(self, accepted: Sequence[tuple[Reply, Taken]], estimate: tuple[NDArray[np.float64], ...] | None) -> None:
        """x <- optimiser(x, g); arrays that travel whole become their senders' mean or maximum."""
        flat, whole = self.layout.split(self.arrays)
        if estimate is not None:
            stepped = self.stepper.step(estimate)
            if all(np.isfinite(part).all() for part in stepped):
                flat = stepped
            else:
                self.stepper = self.optimizer(flat)
                largest = max(accepted, key=lambda a: a[0].report.norm_sq or 0.0)[0].report.client
                self.receiver.fault(
                    "step",
                    f"round {self._round.number}: the step gave NaN or infinity, so the model stays as it was; client "
                    f"{largest!r} sent the largest update; lower server-lr or the clients' learning rate",
                )
        weights = [self.memory.client(reply.report.client).weight or 0.0 for reply, _ in accepted]
        for name in whole:
            contents = [taken.decoded.whole for _, taken in accepted]
            parts = [(w, of[name]) for w, of in zip(weights, contents, strict=True) if name in of]
            if parts:
                whole[name] = combine_whole(parts)
        self.arrays = self.layout.join(flat, whole)

    def _mean_metrics(self, replies: Sequence[Reply]) -> dict[str, float]:
        """Mean of every scalar metric, weighted as the clients are."""
        clients = [reply.report.client for reply in replies]
        weights = [self.memory.client(client).weight or 0.0 for client in clients]
        return self._means(list(zip(weights, clients, (reply.metrics for reply in replies), strict=True)))

    def _means(self, weighted: Sequence[tuple[float, str, Metrics]]) -> dict[str, float]:
        """Weighted mean of every scalar metric over the clients that have it; what is not finite is left out."""
        sums: dict[str, float] = {}
        totals: dict[str, float] = {}
        for weight, client, metrics in weighted:
            for name, value in metrics.items():
                if not isinstance(value, int | float):
                    continue
                if not math.isfinite(value):
                    self.receiver.fault("metric", f"client {client!r}: {name} is {value}; left out of the mean")
                    continue
                sums[name] = sums.get(name, 0.0) + weight * value
                totals[name] = totals.get(name, 0.0) + weight
        return {name: sums[name] / totals[name] for name in sums if totals[name] > 0}

    # ---- evaluation ----------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to each client that can be reached: the model. Its bytes count as downlink."""
        usable = sorted(self._reachable())
        blob = self.sender.model(self.arrays, server_round)
        usable = sorted(set(usable) - self._used_up(len(blob)))
        self._round.downlink_bytes += len(blob) * len(usable)
        messages: list[Message] = []
        for client in usable:
            self.allowance.spend(client, len(blob), self._round.start_s)
            assignment = self.sender.acknowledgement(client, server_round, self.network.now_s())
            request = self.sender.request("evaluate", (assignment,), model=blob, config=config)
            messages.append(message_for(grid, write_request(request), "evaluate", self.clients[client].node_id))
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Mean of every metric over the clients that evaluated, by their examples."""
        answers = [Answer(Asked("evaluate", m.metadata.src_node_id), m) for m in replies]
        means = self._evaluated(server_round, answers)
        return MetricRecord(dict(means)) if means else None

    def _evaluated(self, server_round: int, answers: Iterable[Answer]) -> dict[str, float]:
        taken: list[tuple[str, float, Metrics]] = []
        for answer in answers:
            node = answer.asked.node_id
            try:
                reply = self.receiver.read(answer.message, self.roster.on_node(node))
                for report in reply.reports:
                    if (report.status, report.round) != ("evaluated", server_round):
                        got = f"{report.status!r} of round {report.round}"
                        raise ProtocolError("stale-attempt", f"{got}, expected 'evaluated' of round {server_round}")
            except ProtocolError as error:
                self.receiver.fault(error.kind, f"evaluation at node {node}: {error.detail}")
                continue
            taken += [(r.client, float(r.examples or 0), reply.metrics.get(r.client, {})) for r in reply.reports]
        return self._means([(weight, client, metrics) for client, weight, metrics in sorted(taken, key=lambda t: t[0])])

    def _evaluate(
        self,
        number: int,
        result: Result,
        grid: Grid,
        timeout: float,
        config: ConfigRecord,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        metrics: MetricRecord | None = None
        if self.settings.evaluate == "server" and evaluate_fn is not None:
            metrics = evaluate_fn(number, result.arrays)
            if metrics is not None:
                result.evaluate_metrics_serverapp[number] = metrics
        elif self.settings.evaluate == "clients":
            sent = self._exchange.push("evaluate", self.configure_evaluate(number, result.arrays, config, grid))
            means = self._evaluated(number, self.roster.take_hellos(self._exchange.collect(sent, timeout)))
            if means:
                metrics = MetricRecord(dict(means))
                result.evaluate_metrics_clientapp[number] = metrics
        if metrics is not None:
            self._round.evaluation = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}

    # ---- the end ---------------------------------------------------------------------------

    def _write_row(self, train_wall_s: float, round_wall_s: float) -> None:
        values = row(
            self._round,
            self.layout,
            time_budget_s=self.settings.time_budget_s,
            dense_reply_bytes=self._dense_reply_bytes(self._round.number),
        )
        if self.on_round is None:
            _log.info("%s", line(values))
        else:
            self.on_round(values, {"round": self._round.number, "train_s": train_wall_s, "round_s": round_wall_s})

    def _is_over(self) -> bool:
        s = self.settings
        accuracy, loss = self._round.evaluation.get("accuracy"), self._round.evaluation.get("loss")
        accurate = s.target_accuracy is not None and accuracy is not None and accuracy >= s.target_accuracy
        low = s.target_loss is not None and loss is not None and loss <= s.target_loss
        if s.stop_at_target and (accurate or low):
            return True
        return s.stop_after_s is not None and self.network.now_s() >= s.stop_after_s

    def _settle_all(self, grid: Grid, timeout: float) -> None:
        """Tell every client what was accepted from it last, so that its memory is settled."""
        messages: list[Message] = []
        for client, known in sorted(self.clients.items()):
            acknowledgement = self.sender.acknowledgement(client, 0, self.network.now_s())
            request = self.sender.request("settle", (acknowledgement,), forget=self.settings.forget)
            messages.append(message_for(grid, write_request(request), "train", known.node_id))
        self._exchange.collect(self._exchange.push("settle", messages), min(timeout, 60.0))


def _run_name(grid: Grid) -> str:
    """An experiment's id from Flower's run; grids without one (in-process) have one state folder a run."""
    try:
        return f"run-{grid.run.run_id}"
    except RuntimeError:
        return "run"


def _record(arrays: dict[str, NDArray[np.generic]]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
