"""One safe line of text: cleaned, its secrets masked, cut at a boundary."""

from __future__ import annotations

import re
import unicodedata

from haocompact.redact import mask_secrets

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FRAME = re.compile(r"<(?=<ccr:|/?(?:read-files|modified-files|conversation|previous-summary)\b)", re.I)
_TITLE = re.compile(
    r"(?:#+ +)+(?=(?:Goal|Constraints|Progress|Done|In Progress|Blocked|Key Decisions|Next Steps"
    r"|Critical Context|Earlier Summary|Original Request|Early Progress|Context for Suffix)\b)"
    r"|\*\*(?=Turn Context \(split)"
)
_TAG = re.compile(r"(?:(?:Latest request|User|System|Tool|Proposed): +)+")

_SECRET_HINTS = (
    *(
        "pass",
        "pwd",
        "secret",
        "token",
        "key",
        "bearer",
        "basic",
        "://",
        "akia",
        "asia",
        "aiza",
        "eyj",
        "sk-",
        "sk_",
        "pk_",
    ),
    *(
        "rk_",
        "ghp_",
        "gho_",
        "ghs_",
        "ghu_",
        "ghr_",
        "github_pat",
        "xox",
        "npm_",
        "hf_",
        "glpat",
        "pk-",
        "rk-",
    ),
    *("密码", "口令", "密钥"),
)


def clean(text: str) -> str:
    """One safe line: no control characters, forged structure or secrets. `clean(clean(x)) == clean(x)`."""
    for _ in range(4):
        before, text = text, _clean_once(text)
        if text == before:
            break
    return text


def _clean_once(text: str) -> str:
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = " ".join(text.split())
    if not text.isprintable():
        text = _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))
    if "<" in text:
        text = _FRAME.sub("‹", text)
    if "#" in text or "**Turn" in text:
        text = _TITLE.sub("", text)
    if text[:1] in "LUSTP":
        tag = _TAG.match(text)
        text = text[tag.end() :] if tag else text
    return mask_secrets(text).strip() if _may_hold_secrets(text) else text


def _may_hold_secrets(text: str) -> bool:
    low = text.lower()
    return any(map(low.__contains__, _SECRET_HINTS))


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, ending at a boundary: never inside an identifier or a character."""
    if len(text) <= limit:
        return text
    end = limit - 1
    while end > 0 and not _is_boundary(text, end):
        end -= 1
    return text[:end].rstrip() + "…" if end > 0 else ""


def cut_middle(text: str, limit: int) -> str:
    """`cut`, but keeps the end as well: what is asked often stands last."""
    if len(text) <= limit:
        return text
    start = len(text) - max(limit - 3, 0) // 3
    while start < len(text) and not _is_boundary(text, start):
        start += 1
    tail = text[start:].lstrip()
    return f"{cut(text, limit - 1 - len(tail))} {tail}".strip()


def _is_boundary(text: str, index: int) -> bool:
    left, right = text[index - 1], text[index]
    joins = (
        unicodedata.combining(right) or right in "\u200d\ufe0f" or left == "\u200d" or "🏻" <= right <= "🏿"
    )
    return not joins and not (_is_word(left) and _is_word(right))


def _is_word(char: str) -> bool:
    return char < "\u2e80" and (char.isalnum() or char in "_./:@#-%$\\=+~&?")
