"""A writer waits for the last reader of every queue. Earlier readers of the same queue are implied."""

from typing import Any

from megatrain.store.ticket import Order


class Submitted:
    """Submitted work of one queue."""

    lane = "compute"
    done = False

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def wait(self) -> None: ...
    def order_stream(self) -> None: ...


def test_a_writer_waits_for_the_last_reader_of_every_queue() -> None:
    order = Order("slot")
    # Two streams of one thread, and a second thread on one of them.
    first, last, elsewhere, other = Submitted((1, 0)), Submitted((1, 0)), Submitted((1, 7)), Submitted((2, 0))
    for ticket in (first, elsewhere, other, last):
        order.read(ticket)
    assert {id(wait.ticket) for wait in order.before_writing()} == {id(last), id(elsewhere), id(other)}
