"""Requests to stop at the end of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


@dataclass
class StopRequest:
    """Set by SIGTERM, SIGINT (Ctrl-C) and SIGHUP (closed terminal), or by setting `requested`."""

    requested: bool = False
    number: int = signal.SIGTERM
    """The signal; SIGTERM if there was none."""

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle the signals inside the block, except for those that the process ignores (nohup). A second SIGINT
        interrupts at once."""

        def on_signal(number: int, _: FrameType | None) -> None:
            if self.requested and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.requested, self.number = True, number
            _leave(terminals)

        terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        try:
            old = {number: signal.signal(number, on_signal) for number in taken}
        except ValueError:  # not in the main thread, which alone receives signals
            yield
            return
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _leave(terminals: Sequence[int]) -> None:
    """Redirect output to nowhere if its terminal is closed: printing would fail before the checkpoint is saved."""
    for descriptor in terminals:
        if not os.isatty(descriptor):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
