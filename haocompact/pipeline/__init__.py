"""One function a command; the only place that knows the order of things.

The order of a compaction is its safety argument:

    read -> plan -> summarise -> rebuild -> re-read and compare -> archive, commit, read back
    -> write beside the original, fsync -> check that the original has not changed -> rename -> fsync the folder

A kill before the rename leaves the original; after it the result is there, and what was removed is in the
archive either way.

A command loads only the modules that it needs: `plan` no archive, `retrieve` no summariser.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haocompact.pipeline.compacting import *  # noqa: F403
    from haocompact.pipeline.explaining import *  # noqa: F403
    from haocompact.pipeline.planning import *  # noqa: F403
    from haocompact.pipeline.retrieving import *  # noqa: F403
    from haocompact.pipeline.writing import *  # noqa: F403

_NAMES = {  # module -> what it is asked for here
    "planning": "Planned Request as_needed conversations figures "
    "load not_needed plan prepare record_skip warnings_of",
    "explaining": "as_compacted explain explain_error",
    "compacting": "Compacted Skipped compact store",
    "writing": "Done attempt_in_place compact_in_place compact_to output_name rehearse",
    "retrieving": "Directory clean_hash directory opened_archives raw_segment restore "
    "restore_input segment_messages summary_of verify window_text workers_folder",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
