"""Turns in the queue are charged for the texts that run, and for no others."""

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attnlens_server.clients import Client
from attnlens_server.engine.batch import Batch, Item
from attnlens_server.engine.scheduler import BatchLimits, ItemQueue, Scheduler, Turns
from attnlens_server.errors import DeadlineError

CLIENTS = (Client("a"), Client("b", share=0.5), Client("c", share=4.0), Client("d", is_bulk=True))
LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=6)


class Ledger(Turns):
    """Turns of clients that all begin at once, so that the end of each is the sum of its charges."""

    def serve(self, turn: float) -> None:
        del turn


class Charges(RuleBasedStateMachine):
    """Any sequence of arrivals, cancellations, expired deadlines, batches and unusable graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ItemQueue()
        self.scheduler = Scheduler(BatchLimits(24, max_padding_share=1.0))
        self.sent: list[Item] = []
        self.ran: list[Item] = []
        self.queue._turns = (Ledger(), Ledger())
        self.queue._num_tokens = 1  # never 0, at which the queue forgets the charges

    @rule(client=st.sampled_from(CLIENTS), lengths=LENGTHS, is_background=st.booleans())
    def send(self, client: Client, lengths: list[int], is_background: bool) -> None:
        items = [Item(np.zeros(length, np.int64), (), is_background=is_background) for length in lengths]
        self.queue.put(items, client)
        self.sent += items

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), expires=st.booleans())
    def drop(self, data: st.DataObject, expires: bool) -> None:
        item = data.draw(st.sampled_from(self.sent))
        if expires:
            item.deadline = time.monotonic()
        else:
            item.abandon()

    @precondition(lambda self: self.waiting())
    @rule(can_run=st.booleans(), is_late=st.booleans())
    def take(self, can_run: bool, is_late: bool) -> None:
        batch = self.taken(is_late=is_late)
        if batch and not can_run:
            self.queue.give_back(batch.items)
        elif batch:
            self.ran += batch.items
        for item in batch.items if batch else ():
            item.future.set_result(None)  # type: ignore[arg-type]  # the item has ended

    def taken(self, *, is_late: bool) -> Batch | None:
        """Take a batch. If `is_late`, its first item is cancelled after the choice."""

        def choose(lengths: Sequence[int], num_idle: int) -> list[int]:
            if is_late:
                self.queue._waiting[self.queue._first_candidate()].abandon()
            return self.scheduler.choose(lengths, num_idle)

        self.queue._background_lanes.clear()  # as if another lane took each batch
        self.queue._num_idle = 1
        return self.queue._take_now(choose)

    def waiting(self) -> list[Item]:
        return [*self.queue._waiting, *self.queue._arrived]

    @invariant()
    def each_item_has_one_outcome(self) -> None:
        waiting = {id(item) for item in self.waiting()}
        assert self.queue.num_tokens == 1 + sum(item.num_tokens for item in self.waiting())
        for item in self.sent:
            assert item.future.done() or id(item) in waiting
            if item.future.done() and not item.future.cancelled() and item.future.exception():
                assert isinstance(item.future.exception(), DeadlineError)

    @invariant()
    def clients_are_charged_for_what_runs_or_waits(self) -> None:
        self.queue._receive_arrived()
        self.queue._drop_dead()
        waiting = {id(item) for item in self.waiting()}
        sums = [dict.fromkeys((client.name for client in CLIENTS), 0.0) for _ in self.queue._turns]
        for item in self.sent:
            charges, name = sums[item.is_background], item.client.name
            if id(item) in waiting:
                assert item.turn == pytest.approx(charges[name])
            if item in self.ran or id(item) in waiting:
                charges[name] += item.num_tokens / item.client.share
        for turns, charges in zip(self.queue._turns, sums, strict=True):
            for name, charge in charges.items():
                assert turns._ends.get(name, 0.0) == pytest.approx(charge)


Charges.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCharges = Charges.TestCase
