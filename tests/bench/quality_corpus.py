"""What the summaries of real sessions must have: files, last request, plan and error; identifiers are counted."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from quality_rivals import run_haocompact
from quality_sessions import CORPUS, summary_in

MODIFIES = {"write": "path", "edit": "path", "Write": "file_path", "Edit": "file_path", "MultiEdit": "file_path",
            "NotebookEdit": "notebook_path"}  # fmt: skip
READS = {"read": "path", "Read": "file_path", "NotebookRead": "notebook_path"}
_IDENTIFIER = re.compile(r"\b(?:[a-z]+(?:_[a-z0-9]+)+|[a-z]+(?:[A-Z][a-z0-9]+)+|[\w.-]+/[\w./-]+\.\w{1,4})\b")


def corpus_rows(seeds: int) -> list[dict[str, Any]]:
    """One row a session: equal file lists, the last of each kind, and the share of 20 repeated identifiers."""
    rows = []
    for path in sorted((*CORPUS.glob("pi/*.jsonl"), *CORPUS.glob("claude-code/*.jsonl"))):
        data = path.read_bytes()
        if b'"compact_boundary"' in data or b'"type":"compaction"' in data:
            continue  # the client's own summaries hide what came before
        after = run_haocompact(data, "--keep-recent", "1000")
        summary = summary_in(after)
        if after != data and summary:
            rows.append({"session": path.stem, **_row(_removed(data, after), summary)})
    return [*rows, _total(rows)] if rows else []


def _removed(before: bytes, after: bytes) -> list[dict[str, Any]]:
    """Messages of lines that are gone, side chains left out; read with nothing but the JSON parser."""
    ids = {key for row in _rows(after) for key in _ids(row)}
    rows = [r for r in _rows(before) if isinstance(r.get("message"), dict)]
    main = [r for r in rows if not r.get("isSidechain")] or rows
    return [r["message"] for r in main if not _ids(r) & ids]


def _rows(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):  # a torn line
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _ids(row: dict[str, Any]) -> set[str]:
    return {row[k] for k in ("uuid", "id") if isinstance(row.get(k), str)}


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return (
        [b for b in content if isinstance(b, dict)]
        if isinstance(content, list)
        else [{"type": "text", "text": content}]
    )


def _row(messages: list[dict[str, Any]], summary: str) -> dict[str, Any]:
    calls = [b for m in messages for b in _blocks(m) if b.get("type") in ("tool_use", "toolCall")]
    paths = {kind: {a[keys[b["name"]]] for b in calls if b["name"] in keys
             for a in [b.get("input") or b.get("arguments") or {}] if isinstance(a.get(keys[b["name"]]), str)}
             for kind, keys in (("read", READS), ("modified", MODIFIES))}  # fmt: skip
    told = {tag: set(_section(summary, tag)) for tag in ("read-files", "modified-files")}
    same = (
        told["modified-files"] == paths["modified"]
        and told["read-files"] == paths["read"] - paths["modified"]
    )
    flat = " ".join(summary.split())
    found, count = _identifiers(messages, summary)
    return {
        "files": same,
        "request": _last_request(messages, flat),
        "todos": _last_todos(calls, flat),
        "error": _last_error(messages, flat),
        "identifiers": f"{found} of {count}",
        "chars": len(summary),
    }


def _section(summary: str, tag: str) -> list[str]:
    found = re.search(rf"<{tag}>\n(.*?)\n</{tag}>", summary, re.S)
    return found[1].split("\n") if found else []


def _last_request(messages: list[dict[str, Any]], flat: str) -> bool | None:
    """The beginning of the last thing the user typed (what clients inject is no request)."""
    texts = [
        b.get("text") or ""
        for m in messages
        if m.get("role") == "user"
        for b in _blocks(m)
        if b.get("type") == "text"
    ]
    typed = [
        t for t in texts if t.strip() and not t.lstrip().startswith(("<", "Caveat:", "[Request interrupted"))
    ]
    if not typed:
        return None
    first = re.split(r"[\x00-\x1f#]", typed[-1].strip())[0][:120]
    return " ".join(first.split()) in flat


def _last_todos(calls: list[dict[str, Any]], flat: str) -> bool | None:
    lists = [b["input"]["todos"] for b in calls if b["name"] == "TodoWrite" and b["input"].get("todos")]
    return all(" ".join(t["content"].split())[:100] in flat for t in lists[-1]) if lists else None


def _last_error(messages: list[dict[str, Any]], flat: str) -> bool | None:
    """A line of the last failed result, unless what failed succeeded later; then that it is resolved."""
    failed = [b if b.get("type") == "tool_result" else m for m in messages for b in _blocks(m)
              if b.get("is_error") is True or m.get("isError") is True]  # fmt: skip
    if not failed:
        return None
    content = failed[-1].get("content")
    text = content if isinstance(content, str) else "\n".join(b.get("text") or "" for b in content or [])
    lines = [" ".join(x.split())[:60] for x in text.split("\n") if len(x.strip()) > 5]
    return any(line in flat for line in lines)


def _identifiers(messages: list[dict[str, Any]], summary: str) -> tuple[int, int]:
    seen = Counter(v for m in messages for v in set(_IDENTIFIER.findall(json.dumps(m, ensure_ascii=False))))
    often = sorted(v for v, n in seen.items() if n > 1)
    chosen = random.Random(1).sample(often, min(20, len(often)))
    return sum(v in summary for v in chosen), len(chosen)


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"session": f"all {len(rows)}"}
    for key in ("files", "request", "todos", "error"):
        known = [r[key] for r in rows if r[key] is not None]
        total[key] = f"{sum(known)} of {len(known)}"
    shares = [tuple(map(int, r["identifiers"].split(" of "))) for r in rows]
    total["identifiers"] = f"{sum(a for a, _ in shares)} of {sum(b for _, b in shares)}"
    return {**total, "chars": max(r["chars"] for r in rows)}
