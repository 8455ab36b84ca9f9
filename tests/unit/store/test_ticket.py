"""Whose turn it is at one piece of memory: the last reader of every queue, and no other's, stands for those before."""

from typing import Any

from megatrain.store.ticket import Order


class Given:
    """Work in a queue."""

    lane = "compute"
    done = False

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def wait(self) -> None: ...
    def order_stream(self) -> None: ...


def test_a_writer_waits_for_the_last_reader_of_every_queue() -> None:
    order = Order("slot")
    # One thread on two streams, and another thread on one of them.
    first, last, elsewhere, other = Given((1, 0)), Given((1, 0)), Given((1, 7)), Given((2, 0))
    for ticket in (first, elsewhere, other, last):
        order.read(ticket)
    assert {id(wait.ticket) for wait in order.before_writing()} == {id(last), id(elsewhere), id(other)}
