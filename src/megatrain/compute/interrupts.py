"""Critical sections: a Ctrl-C inside is raised at the end, so that related changes are made together."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferInterrupts:
    """Defers the first Ctrl-C to the end of the section. A second one is raised at once, in case the section hangs."""

    def __init__(self) -> None:
        self._handler: Any = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        # Python runs signal handlers in the main thread only.
        if threading.get_ident() == threading.main_thread().ident and callable(signal.getsignal(signal.SIGINT)):
            self._handler = signal.signal(signal.SIGINT, self._receive)

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        replaced = signal.signal(signal.SIGINT, self._handler)
        if replaced != self._receive:
            # Another handler was installed inside the section: keep it.
            signal.signal(signal.SIGINT, replaced)
        if self._received is not None:
            self._handler(*self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            self._handler(number, frame)
        self._received = (number, frame)
