"""Raw lines <-> records. A record is parsed on demand and always written from its raw bytes.

Lines end at `\\n` only: U+2028, U+0085, VT and FF are text, a `\\r` stays with its line.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import orjson

from haocompact.errors import SourceChanged

BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\n"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
_LONE = re.compile("[\ud800-\udfff]")


class Record:
    """One physical line: `number` (1-based), `raw` bytes with their terminator, `obj` when it is JSON.

    `fault` says why a line is opaque (not JSON); `note` what is unusual about a line that was read all
    the same (invalid UTF-8 replaced, lone surrogate, leading NUL bytes).
    """

    __slots__ = ("_obj", "_parsed", "fault", "note", "number", "raw")

    def __init__(self, number: int, raw: bytes) -> None:
        self.number = number
        self.raw = raw
        self.fault: str | None = None
        self.note: str | None = None
        self._parsed = False
        self._obj: Any = None

    @property
    def body(self) -> bytes:
        """The line without terminator, byte order mark and outer white space."""
        raw = self.raw.strip(_SPACE)
        return raw[3:].strip(_SPACE) if self.number == 1 and raw.startswith(BOM) else raw

    @property
    def blank(self) -> bool:
        return not self.body

    @property
    def obj(self) -> Any:
        """The parsed JSON value, or None for a blank or opaque line."""
        if not self._parsed:
            self._parsed = True
            self._obj = self._parse()
        return self._obj

    @property
    def dict(self) -> dict[str, Any]:
        """The parsed object; an empty one when the line holds anything else."""
        obj = self.obj
        return obj if isinstance(obj, dict) else {}

    def exact(self) -> Any:
        """Parsed with integers of any size (the fast parser turns those beyond 64 bits into floats)."""
        return _parse_exact(self.body.strip(b"\0" + _SPACE)) if self.obj is not None else None

    def _parse(self) -> Any:
        for text in (self.raw, self.body):  # the second without a byte order mark
            try:
                return orjson.loads(text)
            except orjson.JSONDecodeError as error:
                why = str(error)
        return self._parse_slowly(self.body, why) if self.body else None

    def _parse_slowly(self, body: bytes, why: str) -> Any:
        """What the fast parser refuses though it is JSON: lone surrogates, 1e400, NULs around, bad UTF-8."""
        inner = body.strip(b"\0" + _SPACE)
        try:
            if _is_deep(inner):
                raise RecursionError
            obj = _parse_exact(inner)
        except (ValueError, RecursionError) as error:
            self.fault = _fault(inner, why, error)
            return None
        self.note = _note(body, inner, obj)
        return obj


class FileBytes:
    """A file's bytes, read through a window: a slice costs no memory beyond itself, and a file that shrinks
    meanwhile gives an error (a memory map would end the process)."""

    WINDOW = 1 << 20

    def __init__(self, handle: int, size: int) -> None:
        self._handle = handle
        self._size = size
        self._start = 0
        self._window = b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, end, _ = span.indices(self._size)
        if end <= start:
            return b""
        if end - start >= self.WINDOW:  # a line as long as that is not held twice
            return self._read(start, end - start)
        first = start - self._start
        if first < 0 or end - self._start > len(self._window):
            self._start = start - start % self.WINDOW  # whole blocks, so that walking backwards hits them too
            self._window = self._read(self._start, max(end - self._start, self.WINDOW))
            first = start - self._start
        return self._window[first : first + end - start]

    def chunks(self) -> Iterator[bytes]:
        """The whole file in pieces of the window's size."""
        for start in range(0, self._size, self.WINDOW):
            yield self._read(start, self.WINDOW)

    def _read(self, start: int, length: int) -> bytes:
        wanted = min(length, self._size - start)
        parts = []
        while wanted > 0:
            part = os.pread(self._handle, wanted, start)
            if not part:
                raise SourceChanged("the transcript became shorter while it was being read")
            parts.append(part)
            start, wanted = start + len(part), wanted - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Extended:
    """Bytes with more behind them, as one; the first part is not copied."""

    def __init__(self, data: Data, more: bytes) -> None:
        self._data = data
        self._more = more

    def __len__(self) -> int:
        return len(self._data) + len(self._more)

    def __getitem__(self, span: slice) -> bytes:
        start, end, _ = span.indices(len(self))
        size = len(self._data)
        return self._data[start : min(end, size)] + self._more[max(start - size, 0) : max(end - size, 0)]

    def chunks(self) -> Iterator[bytes]:
        yield from chunks_of(self._data)
        yield self._more


Data = bytes | FileBytes | Extended


def chunks_of(data: Data) -> Iterator[bytes]:
    """The bytes in pieces, for hashing and copying."""
    if isinstance(data, bytes):
        yield data
    else:
        yield from data.chunks()


class Records(Sequence[Record]):
    """All lines of a transcript. Only the offsets are held; a record is made when it is asked for."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self._ends = array("Q")
        base = 0
        for chunk in chunks_of(data):
            position = 0
            while (newline := chunk.find(b"\n", position)) >= 0:
                position = newline + 1
                self._ends.append(base + position)
            base += len(chunk)
        if base > (self._ends[-1] if self._ends else 0):
            self._ends.append(base)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._made(index, self.raw(index))

    def _made(self, index: int, raw: bytes) -> Record:
        return Record(index + 1, raw)

    def __iter__(self) -> Iterator[Record]:
        return map(self._made, range(len(self)), self.raws(range(len(self))))

    def raws(self, indexes: Iterable[int]) -> Iterator[bytes]:
        """The bytes of these lines, terminators included; ascending ones are read together."""
        ends, block, first, last = self._ends, b"", 0, 0
        for index in indexes:
            start, end = ends[index - 1] if index else 0, ends[index]
            if start < first or end > last:
                block = self.data[start : max(end, start + FileBytes.WINDOW)]
                first, last = start, start + len(block)
            yield block[start - first : end - first]

    def raw(self, index: int) -> bytes:
        """The bytes of line `index` (0-based), terminator included."""
        return self.data[self._ends[index - 1] if index else 0 : self._ends[index]]

    @property
    def newline(self) -> bytes:
        """The line end that the file uses, for lines that are added."""
        return b"\r\n" if self._ends and self.raw(0).endswith(b"\r\n") else b"\n"

    def ended(self, raw: bytes) -> bytes:
        """A record's bytes as they stand in front of another one."""
        return raw if raw.endswith(b"\n") else raw + self.newline

    def line(self, number: int) -> int:
        """The physical line of a record."""
        return number

    @cached_property
    def document(self) -> Any:
        """The one JSON array or object that the whole file is, where it is not one value a line; else None."""
        lines = (r for r in self if not r.blank)
        first, second = next(lines, None), next(lines, None)
        if first is None or first.body[:1] not in (b"[", b"{"):
            return None
        if first.dict or (first.body[:1] == b"{" and (second is None or second.dict)):
            return None  # one object a line, or a torn one before others
        try:
            return orjson.loads(self.data[:].removeprefix(BOM).strip(_SPACE))
        except orjson.JSONDecodeError:
            return None


class Element(Record):
    """One element of a JSON array, with the comma and the white space behind it."""

    __slots__ = ()

    @property
    def body(self) -> bytes:
        return self.raw.strip(_SPACE + b",")


class Elements(Records):
    """The elements of one array in a JSON document, as records.

    The first record is the document up to the first element, the last what follows the array's last element:
    neither says anything, and all of them joined are the document again.
    """

    def __init__(self, document: bytes, path: tuple[str, ...]) -> None:
        span = value_span(document, path)
        spans = list(elements(document, *span)) if span else []
        self.data = document
        starts = [start for start, _ in spans] + ([spans[-1][1]] if spans else [])
        self._ends = array("Q", [*starts, len(document)])

    def _made(self, index: int, raw: bytes) -> Record:
        if 0 < index < len(self) - 1:
            return Element(index + 1, raw)
        frame = Record(index + 1, raw)
        frame._parsed, frame._obj = True, {}
        return frame

    @property
    def newline(self) -> bytes:
        return b", "

    def ended(self, raw: bytes) -> bytes:
        return raw

    def line(self, number: int) -> int:
        start = self._ends[number - 2] if number > 1 else 0
        return self.data[:start].count(b"\n") + 1


class Cut(Records):
    """The same bytes, with values inside them as records of their own; what is between those are records, too.

    `spans` are the byte ranges of the values, ascending. `values`: the indexes of their records.
    """

    def __init__(self, data: Data, spans: Iterable[tuple[int, int]]) -> None:
        self.data = data
        self._ends = array("Q")
        self.values: list[int] = []
        end = 0
        for first, last in spans:
            if first > end:
                self._ends.append(first)
            self.values.append(len(self._ends))
            self._ends.append(last)
            end = last
        if end < len(data):
            self._ends.append(len(data))
        self._lines = array("Q", [1])
        for index in range(len(self._ends)):
            self._lines.append(self._lines[-1] + self.raw(index).count(b"\n"))

    @property
    def newline(self) -> bytes:
        return b"\n"

    def line(self, number: int) -> int:
        return self._lines[number - 1]


def read(data: Data) -> Records:
    """Split bytes into records: `write(read(b)) == b` for every input."""
    return Records(data)


def write(records: Records) -> bytes:
    return b"".join(records.raw(i) for i in range(len(records)))


def dump(obj: object) -> bytes:
    """One new JSON line (no terminator): native key order, lone surrogates replaced, U+2028/2029 escaped."""
    text = json.dumps(obj, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return clean(text).encode()


def clean(text: str) -> str:
    """Text without lone surrogates, so that it can be encoded: each becomes U+FFFD."""
    if text.isascii():
        return text
    return _LONE.sub("\ufffd", text)


def splice(raw: bytes, path: tuple[str, ...], value: bytes) -> bytes:
    """Replace the value at `path` (object keys) in a JSON line, leaving every other byte as it is.

    >>> splice(b'{"a": {"b":1}}', ("a", "b"), b"2")
    b'{"a": {"b":2}}'
    """
    span = value_span(raw, path)
    return raw if span is None else raw[: span[0]] + value + raw[span[1] :]


def value_span(raw: bytes, path: tuple[str, ...]) -> tuple[int, int] | None:
    """Byte range of the value at `path` (object keys only; of a repeated key the last counts)."""
    start, end = 0, len(raw)
    for key in path:
        found = None
        for name, first, last in members(raw, start, end):
            if name == key:
                found = first, last
        if found is None:
            return None
        start, end = found
    return start, end


def members(raw: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[str, int, int]]:
    """Keys of the object in `raw[start:end]` with the byte range of each value."""
    depth, key, first = 0, None, -1
    previous_end = start
    for token in _TOKEN.finditer(raw, start, len(raw) if end is None else end):
        text = token.group()[:1]
        if depth == 1 and key is not None and first < 0 and text != b":":
            first = token.start()
        if depth == 1 and text in (b",", b"}"):
            if key is not None:
                yield key, first, previous_end
            key, first = None, -1
        elif depth == 1 and key is None and text == b'"':
            key = json.loads(token.group().decode("utf-8", "replace"))
        depth += (text in (b"{", b"[")) - (text in (b"}", b"]"))
        previous_end = token.end()


def elements(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Byte range of each element of the array in `raw[start:end]`."""
    depth, first, previous_end = 0, -1, start
    for token in _TOKEN.finditer(raw, start, end):
        text = token.group()[:1]
        if depth == 1 and first < 0 and text not in (b",", b"]"):
            first = token.start()
        if depth == 1 and text in (b",", b"]") and first >= 0:
            yield first, previous_end
            first = -1
        depth += (text in (b"{", b"[")) - (text in (b"}", b"]"))
        previous_end = token.end()


DEEPEST = 1024  # levels of nesting, as the fast parser has it


def _is_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= DEEPEST:
        return False
    depth = 0
    for token in _TOKEN.finditer(body):
        text = token.group()[:1]
        depth += (text in (b"{", b"[")) - (text in (b"}", b"]"))
        if depth > DEEPEST:
            return True
    return False


def _parse_exact(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "replace"), parse_constant=_refuse_constant, parse_int=_parse_int)


def _parse_int(digits: str) -> int | float:
    return int(digits) if len(digits) < 4000 else float(digits)  # the interpreter's own limit is 4,300 digits


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _fault(body: bytes, why: str, error: Exception) -> str:
    if not body:
        return "NUL bytes"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "invalid UTF-8"
    return f"not JSON ({error if 'is not JSON' in str(error) else why.partition(':')[0]})"


def _note(body: bytes, inner: bytes, obj: Any) -> str | None:
    if len(inner) < len(body):
        return "NUL bytes around the record"
    try:
        body.decode()
    except UnicodeDecodeError:
        return "invalid UTF-8, read with replacement characters"
    return "lone surrogate" if _LONE.search(json.dumps(obj, ensure_ascii=False)) else None
