"""What every table and JSON object is made with: safe text, numbers, errors."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from haocompact.errors import HaoError

if TYPE_CHECKING:
    from rich.table import Table


VERSION = 1  # of the JSON contract

_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    """Text that can't move a terminal's cursor, set its title or clipboard, or reorder its letters."""
    return _UNSAFE.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def place(text: str) -> str:
    """A path, or a line that begins with one, as it is shown: `-` is (stdin)."""
    return re.sub("^-(?=:|$)", "(stdin)", visible(text))


def printable(text: str) -> str:
    """As `visible`, but lines stay lines."""
    return "\n".join(visible(line.replace("\t", "    ")) for line in text.split("\n"))


def new_table(*columns: tuple[str, str], wrap: str = "") -> Table:
    """A table whose figures and words are never cut short; only the column `wrap` gives way to a narrow terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for name, side in columns:
        table.add_column(name, justify=side, overflow="fold", no_wrap=name != wrap)  # type: ignore[arg-type]
    return table


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}".removesuffix(".0")


def near(path: str) -> str:
    """A path below the current folder as one would type it there."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) or path


def dumps(obj: dict[str, Any]) -> str:
    """One line; what `visible` escapes is escaped here, too, so that the line can be shown on a terminal."""
    text = json.dumps(obj, ensure_ascii=False, separators=(", ", ": "))
    return _UNSAFE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def error_json(error: HaoError, path: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"version": VERSION, "path": error.path or path, "result": "error"}
    found |= {"code": error.code, "message": str(error.args[0]), "line": error.line}
    sent, received = getattr(error, "tokens", (0, 0))
    if sent or received:
        found["usage"] = {"input_tokens": sent, "output_tokens": received}
    if error.why is not None:
        cause, explanation, suggestion = error.why
        found |= {"cause": cause, "explanation": explanation, "suggestions": [suggestion]}
    return found


def format_line(path: str, format: str, named: str | None) -> str:
    return f"{place(path)}: format {format}, {'as named' if named else 'told by its content'}"
