"""Ctrl-C at the wrong moment: sections that change several things which belong together end before it is raised."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferInterrupts:
    """Inside, a first Ctrl-C waits until the end; a second one is raised at once, in case the section does not end."""

    def __init__(self) -> None:
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        # Python runs signal handlers in the main thread alone.
        if threading.get_ident() == threading.main_thread().ident and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._receive)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        replaced = signal.signal(signal.SIGINT, self._handler)
        if replaced != self._receive:
            # Somebody has put a handler of their own in place meanwhile.
            signal.signal(signal.SIGINT, replaced)
        if self._received is not None:
            self._handler(*self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self._handler(number, frame)
        self._received = (number, frame)
