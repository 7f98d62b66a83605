"""A request to stop at the end of a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Set by SIGTERM and SIGINT, or by anyone who sets `requested`."""

    requested: bool = False

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take the two signals inside; a second SIGINT interrupts at once."""

        def on_signal(number: int, _: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested = True

        try:
            old = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread, which alone receives signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
