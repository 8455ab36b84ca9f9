"""Sections that end before a Ctrl-C is raised."""

import signal
import threading
from typing import Any

import pytest

from megatrain.compute.interrupts import DeferInterrupts


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_section_ends_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press()
            done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_is_raised_at_once() -> None:
    """A section that waits for a lane which never ends must not keep Ctrl-C out."""
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press()
            press()
            pytest.fail("it went on")


def test_sections_inside_sections() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            with DeferInterrupts():
                press()
            done.append(True)
    assert done


def test_an_error_does_not_hide_it() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press()
            raise ValueError


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_handlers_of_others(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferInterrupts():
            press()
        assert signal.getsignal(signal.SIGINT) is handler
        with DeferInterrupts():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "put there inside"
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_handlers_alone() -> None:
    seen = []

    def work() -> None:
        with DeferInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
