"""Frozen results -> rich table or JSON. Text of a transcript is data: never markup, never control codes.

Nothing here shows message text: a row says what a message is (texts, calls, results), not what it says.
A command loads only the modules that it shows something with.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from haocompact.show.diagnoses import *  # noqa: F403
    from haocompact.show.logs import *  # noqa: F403
    from haocompact.show.plans import *  # noqa: F403
    from haocompact.show.results import *  # noqa: F403
    from haocompact.show.segments import *  # noqa: F403
    from haocompact.show.settings import *  # noqa: F403
    from haocompact.show.text import *  # noqa: F403

_NAMES = {  # module -> what it is asked for here
    "text": "VERSION dumps error_json format_line near place printable visible",
    "plans": "FOLD_ENDS OVERLAP ROWS_IN_JSON Row plan_figures plan_json plan_table rows title turn_rows what",
    "diagnoses": "diag_json diag_text why_text",
    "logs": "entry_json entry_line log_json log_text log_totals",
    "settings": "Setting settings_json settings_line settings_text",
    "results": "BatchReport COUNTED_ONLY ROWS_SHOWN asks_text batch_table done_json "
    "detail_lines done_line redacted_line spent_line totals_json totals_text",
    "segments": "directory_json directory_table exported_json run_json run_line stats_json stats_text",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
