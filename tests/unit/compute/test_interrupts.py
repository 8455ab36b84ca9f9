"""`DeferInterrupts` raises a Ctrl-C after its section has ended."""

import signal
import threading
from typing import Any

import pytest

from megatrain.compute.interrupts import DeferInterrupts


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_section_ends_first() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press_ctrl_c()
            done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_raised_at_once() -> None:
    """Ctrl-C must work in a section that waits forever for a lane."""
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press_ctrl_c()
            press_ctrl_c()
            pytest.fail("the second Ctrl-C was not raised")


def test_nested_sections() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            with DeferInterrupts():
                press_ctrl_c()
            done.append(True)
    assert done


def test_an_error_does_not_hide_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with DeferInterrupts():
            press_ctrl_c()
            raise ValueError


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_other_signal_handlers_are_kept(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferInterrupts():
            press_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is handler
        with DeferInterrupts():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a handler set inside the section must stay"
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_change_handlers() -> None:
    seen = []

    def work() -> None:
        with DeferInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
