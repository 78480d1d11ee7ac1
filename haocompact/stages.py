"""What a command is at: work that may take long is a stage with a name, and one who listens hears of it.

    with stage("summarise"):  ->  listener("summarise", None), the work, listener("summarise", seconds)

Nobody listens unless somebody asked: then a stage costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

Listener = Callable[[str, float | None], None]
"""Gets (stage, None) when one begins and (stage, seconds) when it has ended, also by an error."""

_listeners: list[Listener] = []


@contextmanager
def heard(*listeners: Listener) -> Iterator[None]:
    """These listen, and no others, until the block ends."""
    before, _listeners[:] = _listeners[:], listeners
    try:
        yield
    finally:
        _listeners[:] = before


@contextmanager
def stage(name: str) -> Iterator[None]:
    start = perf_counter()
    _tell(name, None)
    try:
        yield
    finally:
        _tell(name, perf_counter() - start)


def _tell(name: str, seconds: float | None) -> None:
    for listener in _listeners:
        listener(name, seconds)
