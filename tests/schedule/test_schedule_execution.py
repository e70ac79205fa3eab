"""The tables really run: one thread a rank, blocking sends, and the gradients are right.

The model is a chain of scalars, x -> w_s x, so that every gradient is known by hand. A send
returns only when the peer has taken the message, a collective when all members are there: the
hardest transport there is.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from fractions import Fraction

import pytest

from hpctrain.errors import ImpossibleError
from hpctrain.schedule import Action, ActionKind, Schedule, make, names

K = ActionKind
WAIT = 20.0


class Wire:
    """Rendezvous between ranks: messages and all-rank sums."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lock = threading.Condition()
        self.box: dict[tuple[int, int], object] = {}
        self.meetings: dict[tuple, dict[int, Fraction]] = defaultdict(dict)
        self.broken = False

    def _wait(self, ready) -> None:
        if not self.lock.wait_for(lambda: self.broken or ready(), WAIT) or self.broken:
            self.broken = True
            self.lock.notify_all()
            raise TimeoutError("stuck")

    def send(self, source: int, target: int, message: object) -> None:
        with self.lock:
            pair = (source, target)
            self._wait(lambda: pair not in self.box)
            self.box[pair] = message
            self.lock.notify_all()
            self._wait(lambda: self.box.get(pair) is not message)  # until it is taken

    def receive(self, source: int, target: int) -> object:
        with self.lock:
            pair = (source, target)
            self._wait(lambda: pair in self.box)
            message = self.box.pop(pair)
            self.lock.notify_all()
            return message

    def meet(self, key: tuple, rank: int, value: Fraction, members: int) -> dict[int, Fraction]:
        with self.lock:
            self.meetings[key][rank] = value
            self.lock.notify_all()
            self._wait(lambda: len(self.meetings[key]) == members)
            return self.meetings[key]


class Rank(threading.Thread):
    """Executes one list. The loss of a micro-batch is the sum of u_r x over all ranks."""

    def __init__(self, schedule: Schedule, rank: int, wire: Wire) -> None:
        super().__init__(daemon=True)
        self.schedule, self.rank, self.wire = schedule, rank, wire
        self.last = schedule.stages.stages - 1
        self.inputs: dict[tuple[int, int], Fraction] = {}
        self.outputs: dict[tuple[int, int], Fraction] = {}
        self.grads: dict[tuple[int, int], Fraction] = {}  # gradient of a stage's output
        self.kept: dict[tuple[int, int], Fraction] = {}
        self.host: dict[tuple[int, int], Fraction] = {}
        self.weight_grads: dict[int, Fraction] = defaultdict(Fraction)
        self.output_grad = Fraction(0)
        self.embedding_grad = Fraction(0)
        self.partial: dict[tuple[str, int], Fraction] = {}
        self.shared: dict[tuple[int, int], Fraction] = {}
        self.error: BaseException | None = None
        self.peak = Fraction(0)

    def run(self) -> None:
        try:
            for action in self.schedule.actions[self.rank]:
                self.step(action)
        except BaseException as error:
            self.error = error

    def step(self, action: Action) -> None:
        kind, stage, j, _, peer = action
        cell = (stage, j)
        route = self.schedule.stages.routes[self.schedule.route_of[j or 0]]
        match kind:
            case K.F:
                x = self.inputs.pop(cell) if cell in self.inputs else token(j)
                self.kept[cell] = x
                y = weight(stage) * x
                if stage < self.last and route[stage + 1] == self.rank:
                    self.inputs[stage + 1, j] = y
                else:
                    self.outputs[cell] = y
                held = Fraction(len(self.kept) * self.schedule.ranks, self.last + 1)
                self.peak = max(self.peak, held)
            case K.B:
                self.input_grad(cell, route)
                self.weight_grads[stage] += self.kept.pop(cell) * self.grads.pop(cell)
            case K.I:
                self.input_grad(cell, route)
            case K.W:
                self.weight_grads[stage] += self.kept.pop(cell) * self.grads.pop(cell)
            case K.SEND_F:
                self.wire.send(self.rank, peer, ("F", stage + 1, j, self.outputs.pop(cell)))
            case K.RECV_F:
                *label, x = self.wire.receive(peer, self.rank)
                assert label == ["F", stage, j]
                self.inputs[cell] = x
            case K.SEND_B:
                self.wire.send(self.rank, peer, ("B", stage - 1, j, self.outputs.pop(cell)))
            case K.RECV_B:
                *label, grad = self.wire.receive(peer, self.rank)
                assert label == ["B", stage, j]
                self.grads[cell] = grad
            case K.REDUCE:
                pair = ("reduce", stage)
                both = self.wire.meet(pair, self.rank, self.weight_grads[stage], 2)
                self.weight_grads[stage] = sum(both.values(), Fraction(0))
            case K.OFFLOAD:
                self.host[cell] = self.kept.pop(cell)
            case K.RELOAD:
                self.kept[cell] = self.host.pop(cell)
            case _:
                self.vocabulary(action)

    def input_grad(self, cell: tuple[int, int], route: tuple[int, ...]) -> None:
        stage, j = cell
        if stage == self.last and not self.schedule.vocabulary:
            self.outputs.pop(cell)
            self.grads[cell] = sum((head(r) for r in range(self.schedule.ranks)), Fraction(0))
        assert cell in self.kept, "needs its forward, in device memory"
        grad = weight(stage) * self.grads[cell]
        if stage and route[stage - 1] == self.rank:
            self.grads[stage - 1, j] = grad
        elif stage or self.schedule.vocabulary:
            self.outputs[cell] = grad

    def vocabulary(self, action: Action) -> None:
        kind, stage, j, _, root = action
        ranks = self.schedule.ranks
        match kind:
            case K.E:
                self.partial["E", j] = token(j) / ranks
            case K.S:
                x = self.shared[stage, j]
                self.partial["S", j] = head(self.rank)
                if self.schedule.vocabulary == 1:
                    self.partial["T", j] = x
            case K.STATS:
                self.wire.meet(("stats", j), self.rank, self.partial["S", j], ranks)
                self.partial["T", j] = self.shared[stage, j]
            case K.T:
                self.output_grad += self.partial.pop(("T", j))
            case K.D:
                self.embedding_grad += self.shared.pop((-1, j))
            case K.SHARE:
                value = self.outputs.pop((stage, j)) if self.rank == root else Fraction(0)
                all_values = self.wire.meet(("share", stage, j), self.rank, value, ranks)
                self.shared[stage if stage else -1, j] = all_values[root]
            case K.COMBINE:
                part = self.partial.pop(("S" if stage else "E", j))
                total = self.wire.meet(("combine", stage, j), self.rank, part, ranks)
                if self.rank == root:
                    where = self.grads if stage else self.inputs
                    where[stage, j] = sum(total.values(), Fraction(0))
            case _:
                assert kind in (K.OPT, K.GATHER, K.RESHARD, K.SCATTER)


def token(j: int) -> Fraction:
    return Fraction(j + 1)


def weight(stage: int) -> Fraction:
    return Fraction(stage + 2, stage + 1)


def head(rank: int) -> Fraction:
    return Fraction(1, rank + 1)


def execute(schedule: Schedule) -> list[Rank]:
    wire = Wire(schedule.ranks)
    threads = [Rank(schedule, rank, wire) for rank in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT * 2)
    for thread in threads:
        assert not thread.is_alive()
        if thread.error is not None:
            raise thread.error
    return threads


def check(schedule: Schedule) -> None:
    threads = execute(schedule)
    stages, m, p = schedule.stages.stages, schedule.micro_batches, schedule.ranks
    # d loss / d w_s = sum_j token_j * (product of all other weights) * sum_r u_r
    everything = Fraction(1)
    for stage in range(stages):
        everything *= weight(stage)
    heads = sum((head(r) for r in range(p)), Fraction(0))
    tokens = sum((token(j) for j in range(m)), Fraction(0))
    for thread in threads:
        for stage, found in thread.weight_grads.items():
            assert found == tokens * everything / weight(stage) * heads
        assert set(thread.weight_grads) == {s for _, s in schedule.stages.held[thread.rank]}
        left = (thread.inputs, thread.outputs, thread.grads, thread.kept, thread.host)
        assert not any(left), "everything was used"
        assert thread.peak <= schedule.claim.peak_activations
        if schedule.vocabulary:
            assert thread.output_grad == tokens * everything
            assert thread.embedding_grad == m * everything * heads


@pytest.mark.parametrize("name", [name for name in names() if name != "auto"])
@pytest.mark.parametrize("suffix", ["", "+2bp", "+vocab", "+offload+fsdp", "+2bp+vocab+offload"])
def test_gradients_are_those_of_one_process(name, suffix):
    for p, m in ((2, 2), (4, 8), (4, 4)):
        try:
            schedule = make(name + suffix, ranks=p, micro_batches=m)
        except ImpossibleError:
            continue
        check(schedule)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "v-half", "hanayo"])
def test_vocabulary_passes_with_two_barriers(name):
    check(make(f"{name}+vocab", ranks=4, micro_batches=8, barriers=2))


def test_one_rank_and_one_micro_batch():
    for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "v-min", "hanayo", "layered", "zeropp"):
        check(make(name, ranks=1, micro_batches=3))
        check(make(name, ranks=3, micro_batches=1))


def test_the_harness_notices_a_deadlock(monkeypatch):
    monkeypatch.setitem(globals(), "WAIT", 0.5)
    schedule = make("1f1b", ranks=2, micro_batches=2)
    row = list(schedule.actions[1])
    first = next(i for i, a in enumerate(row) if a.kind is K.SEND_B)
    receive = next(i for i, a in enumerate(row) if a == Action(K.RECV_F, 1, 1, 0, 0))
    row[first], row[receive] = row[receive], row[first]
    with pytest.raises((TimeoutError, KeyError)):
        execute(schedule.with_actions((schedule.actions[0], tuple(row))))
