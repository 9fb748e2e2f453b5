"""The signals that ask this program to end."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM; and SIGHUP, of a terminal that is closed, unless `nohup` had it ignored."""
    hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
    if hang_up is None or signal.getsignal(hang_up) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, hang_up)


def handle(handler: Handler, *more: signal.Signals) -> dict[signal.Signals, Any]:
    """Handle them, and `more`, in this way; how each was handled before."""
    return {sign: signal.signal(sign, handler) for sign in (*ending_signals(), *more)}


def restore(before: dict[signal.Signals, Any]) -> None:
    """As it was before `handle`."""
    for sign, handler in before.items():
        signal.signal(sign, handler)


def interruptible() -> None:
    """Ctrl-C ends what waits in a system call, as it does in Python; polars, once imported, has the call go on instead."""
    if hasattr(signal, "siginterrupt"):  # not on Windows
        signal.siginterrupt(signal.SIGINT, True)
