"""The settings in force, each with where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haocompact.show.text import VERSION, visible

if TYPE_CHECKING:
    pass


Setting = tuple[str, object, str, str]
"""Option, value, source (option, environment, settings file, default), and the variable it comes from."""


def settings_text(found: Sequence[Setting], file: Path) -> list[str]:
    rows = [
        (name, source + (f" {variable}" if variable else ""), value)
        for name, value, source, variable in found
    ]
    names, sources = max(len(name) for name, _, _ in rows), max(len(source) for _, source, _ in rows)
    lines = [
        f"{name:<{names}}  {source:<{sources}}  {visible(_setting_value(value))}"
        for name, source, value in rows
    ]
    return [*lines, f"settings file: {visible(str(file))}{'' if file.is_file() else ', which is not there'}"]


def settings_line(found: Sequence[Setting], file: Path) -> str:
    """Those of one call in a line."""
    told = [
        f"{name} {visible(_setting_value(v))} ({variable or source})" for name, v, source, variable in found
    ]
    given = ", ".join([*told, "the rest as by default" if told else "all as by default"])
    return f"settings: {given}; settings file: {visible(str(file))}{'' if file.is_file() else ', not there'}"


def _setting_value(value: object) -> str:
    return (
        "-" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
    )


def settings_json(found: Sequence[Setting], file: Path) -> dict[str, Any]:
    def plain(value: object) -> object:
        return value if value is None or isinstance(value, (int, float)) else str(value)

    settings = {name[2:]: {"value": plain(value), "source": source} for name, value, source, _ in found}
    return {"version": VERSION, "settings_file": str(file), "settings": settings}
