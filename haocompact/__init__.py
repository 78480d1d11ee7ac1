"""haocompact: compact coding-agent transcripts.

    from haocompact import compact
    result = compact("session.jsonl", archive="archive.db")

The names below are loaded when they are first used; importing the package does no work.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["CompactionSettings", "HaoError", "Result", "compact", "diagnose", "plan", "read", "retrieve"]

if TYPE_CHECKING:
    from haocompact.api import Result, compact, diagnose, plan, read, retrieve
    from haocompact.compaction import CompactionSettings
    from haocompact.errors import HaoError

_ELSEWHERE = {"CompactionSettings": "compaction", "HaoError": "errors"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
