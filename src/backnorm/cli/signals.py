"""Signals that end the command: an exception comes of each, and again until somebody sees to it.

What a handler raises can get lost: Python drops it in a finaliser and in a weak reference's
callback, such as every import has, and compiled code may take it for an error of its own. About one
signal in two hundred was ignored for that. So the handler remembers the signal, and a timer has it
raise once more, unless what it raised is being handled: whoever tidies up is not disturbed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["NUMBERS", "Signals", "signals"]

#: The signals that end the command; its exit status is 128 and the number.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds after which an exception that has not been seen to is raised again.
_AGAIN = 0.1


class Signals:
    """What is known of the signals to this process.

    Attributes
    ----------
    received : int or None
        The number of the first one, until it is heeded.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._held = False

    def watch(self) -> None:
        """Begin to handle signals, and hold them until `release`; those that are ignored stay so.

        What started the command may have it ignore some, as nohup does.
        """
        self._held = True
        signal.signal(signal.SIGALRM, lambda *_: self._raise())
        for number in NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        # Of an exception that gets lost, Python and compiled code print what they know.
        sys.unraisablehook = self._silenced(sys.unraisablehook)
        sys.excepthook = self._silenced(sys.excepthook)

    def release(self) -> None:
        """Raise for a signal now, also for one that came before."""
        self._held = False
        self._raise()

    def heed(self) -> None:
        """Take note of the signal, from where its exception is handled; the work goes on."""
        self.received = None
        signal.setitimer(signal.ITIMER_REAL, 0)

    def leave(self) -> None:
        """Have signals end the process at once from now on: there is nothing left to be done."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in NUMBERS:
            if signal.getsignal(number) == self._receive:
                signal.signal(number, signal.SIG_DFL)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._held and self.received is not None:
            # Whatever holds the first one hangs, and has made nothing that would have to go.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.received is None:
            self.received = number
        self._raise()

    def _raise(self) -> None:
        if self.received is None or self._held:
            return
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        if _is_handled():
            return
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.received)

    def _silenced(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: hook(*given) if self.received is None else None


def _is_handled() -> bool:
    """Whether an exception that ends the process is being handled, or led to what is."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return True
        error = error.__context__
    return False


#: Of this process.
signals = Signals()
