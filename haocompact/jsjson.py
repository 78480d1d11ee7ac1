"""JSON as JavaScript's `JSON.stringify` writes it: what pi counts and what berry-agent hashes.

Source: ECMA-262, SerializeJSONProperty, QuoteJSONString, Number::toString, OrdinaryOwnPropertyKeys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_SPECIAL = re.compile(r'["\\\x00-\x1f\ud800-\udfff]')
_LAST_ARRAY_INDEX = 2**32 - 2

KeyOrder = Callable[[Iterable[str]], list[str]]


def utf16_length(text: str) -> int:
    """Length in UTF-16 code units, as JavaScript's `.length` counts: `utf16_length("a😀") == 3`."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def utf16_key(text: str) -> bytes:
    """Sort key that orders strings as JavaScript does (by UTF-16 unit)."""
    return text.encode("utf-16-be", "surrogatepass")


def file_order(keys: Iterable[str]) -> list[str]:
    """Keys as they stand in the file."""
    return list(keys)


def js_order(keys: Iterable[str]) -> list[str]:
    """Array-index keys first, ascending; then the others in order: `{b, 10, 2}` -> `2, 10, b`."""
    names = list(keys)
    numeric = sorted((k for k in names if _is_array_index(k)), key=int)
    return numeric + [k for k in names if not _is_array_index(k)] if numeric else names


def canonical_order(keys: Iterable[str]) -> list[str]:
    """Sorted by UTF-16 unit, then in JavaScript's own order: berry-agent's canonical JSON."""
    return js_order(sorted(keys, key=utf16_key))


def stringify(value: object, *, order: KeyOrder = js_order, exact_integers: bool = False) -> str:
    """One JSON text without spaces; numbers as doubles unless `exact_integers`."""
    if isinstance(value, str):
        return _quote(value)
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if exact_integers or abs(value) <= 2**53 else _number(_to_double(value))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        pairs = (f"{_quote(k)}:{stringify(value[k], order=order, exact_integers=exact_integers)}"
                 for k in order(value))  # fmt: skip
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(stringify(v, order=order, exact_integers=exact_integers) for v in value) + "]"
    raise TypeError(f"not a JSON value: {type(value).__name__}")


def _is_array_index(key: str) -> bool:
    return key.isascii() and key.isdigit() and str(int(key)) == key and int(key) <= _LAST_ARRAY_INDEX


def _quote(text: str) -> str:
    return f'"{_SPECIAL.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    char = match.group()
    return _ESCAPES.get(char) or f"\\u{ord(char):04x}"


def _to_double(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _number(value: float) -> str:
    """Number::toString: shortest digits, plain notation from 1e-7 up to 1e21."""
    if not math.isfinite(value):
        return "null"
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{abs(value)!r}".lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    return ("-" if value < 0 else "") + _place_point(digits, point)


def _place_point(digits: str, point: int) -> str:
    if 0 < point <= 21:
        return digits.ljust(point, "0") if len(digits) <= point else f"{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"0.{'0' * -point}{digits}"
    rest = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{rest}e{'+' if point > 0 else '-'}{abs(point - 1)}"
