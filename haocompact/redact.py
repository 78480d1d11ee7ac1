"""Secrets in text: the one place that knows what they look like.

    mask_secrets  labelled values and well-known shapes; precise enough for a summary's prose
    mask_error    stricter, for error texts: a lost word costs nothing there
    Redactor      for what is sent to a model: also the patterns of detect-secrets; counts what it masks

Of detect-secrets only the patterns are used: no file is scanned, nothing is verified over the network. Its
detectors of high entropy are left out, since they take hashes, ids and plain words of code for secrets.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

SECRET = "[REDACTED]"
LINE = 4096  # characters that the library's patterns see at once; a longer line is taken in parts

_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:(?!-----BEGIN).){0,20000}?-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    r"|(?:\s|\\[nr]|[A-Za-z0-9+/=]{16,}|(?:Proc-Type|DEK-Info): [^\n\\]*)*)",
    re.DOTALL,
)
_SHAPES = re.compile(
    r"\b(?:[spr]k[-_](?=[\w-]*\d)(?:live_|test_|ant-|proj-)?[\w-]{16,}|A(?:KI|SI)A[0-9A-Z]{12,}|gh[opsur]_\w{16,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|npm_\w{30,}|hf_\w{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)"
)
_AUTHORIZATION = re.compile(r"\b((?:Bearer|Basic) +)((?=[\w.~+/-]*\d)[\w.~+/-]{12,}=*)", re.IGNORECASE)
_USERINFO = re.compile(r"((?<=://)[^\s/:@\[]*:)([^\s/@]+)(?=@)")
_ASSIGNED = re.compile(
    r"((?:pass(?:word|wd|phrase)|_pass|\bpwd|secret|token|密码|口令|密钥"
    r"|(?:api|access|private|auth|signing|encryption|client|account|service)[_-]?key)\\?[\"'`]?\s*)"
    r"(=|:|：|\bis\b|是|为)(\s*\\?[\"'`]?)"
    r"((?:\\(?![nrt\"'])|[^\s\"'`,;\\，。；]){3,})",
    re.IGNORECASE,
)
_CODE_VALUE = re.compile(
    r"[$<{(\[*%]|.*[(\[{]|(?:none|null|true|false|str|string|undefined|required|optional)\b", re.IGNORECASE
)


def mask_secrets(text: str) -> str:
    """Replace the values of secrets and keep their names: `api_key=[REDACTED]`."""
    return _masked(text, lambda kind, value: None)


def _masked(text: str, note: Callable[[str, str], object]) -> str:
    """`note(kind, value)` is told of each secret."""

    def whole(kind: str, match: re.Match[str]) -> str:
        note(kind, match.group())
        return SECRET

    def second(kind: str, match: re.Match[str]) -> str:
        if match.group(2) == SECRET:
            return match.group()
        note(kind, match.group(2))
        return match.group(1) + SECRET

    def assigned(match: re.Match[str]) -> str:
        if not _tells(match):
            return match.group()
        note("password or token", match.group(4))
        return "".join(match.groups()[:3]) + SECRET

    text = _PRIVATE_KEY.sub(partial(whole, "private key"), text)
    text = _SHAPES.sub(partial(whole, "API key"), text)
    text = _AUTHORIZATION.sub(partial(second, "authorization"), text)
    text = _USERINFO.sub(partial(second, "password in a URL"), text)
    return _ASSIGNED.sub(assigned, text)


def _tells(match: re.Match[str]) -> bool:
    """Whether an assigned value is a secret rather than code, prose or a mask."""
    name, sign, _, value = match.groups()
    if SECRET in value or _CODE_VALUE.match(value):
        return False
    plain = name.lower().lstrip("_").startswith(("pass", "pwd", "密码", "口令")) and sign in "=:："
    return plain or (len(value) >= 6 and any(c.isdigit() for c in value))


# ------------------------------------------------------------------------------------ error texts
_IN_ERRORS = (
    (re.compile(r"(https?://)[^\s/@]+@"), r"\1"),
    (re.compile(r"(https?://[^\s?#]+)[?#]\S*"), r"\1"),
    (re.compile(r"(?i)((?:api[_-]?key|token|secret|password|authorization)\"?\s*[=:]\s*\"?)(?:bearer\s+)?[^\s\"',}]+"),
     rf"\1{SECRET}"),
    (re.compile(r"(?i)bearer\s+\S+"), f"Bearer {SECRET}"),
    (re.compile(r"\b(?:sk|pk|rk)-[\w-]{8,}"), SECRET),
)  # fmt: skip
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_CHARS = 8  # a shorter value would stand in too many innocent places


def mask_error(text: str) -> str:
    """An error text without keys: URL credentials and queries, tokens and Authorization values go, and so does
    what the environment calls a key."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARS and _SECRET_NAME.search(name):
            text = text.replace(value, SECRET)
    for pattern, replacement in _IN_ERRORS:
        text = pattern.sub(replacement, text)
    return text


# ------------------------------------------------------------------------------------- what is sent
class Redactor:
    """Masks secrets in text that leaves the machine; equal secrets count once."""

    def __init__(self) -> None:
        self._found: set[tuple[str, str]] = set()

    def __call__(self, text: str) -> str:
        text = _masked(text, lambda kind, value: self._found.add((kind, value)))
        return "".join(map(self._by_library, _lines(text)))

    def _by_library(self, line: str) -> str:
        for kind, value in _detected(line):
            pattern = rf"(?<!\w){re.escape(value)}(?!\w)"
            line, count = re.subn(pattern, SECRET, line)
            if count:
                self._found.add((kind, value))
        return line

    @property
    def counts(self) -> dict[str, int]:
        """How many different secrets of each kind."""
        return dict(sorted(Counter(kind for kind, _ in self._found).items()))


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        yield from (line[i : i + LINE] for i in range(0, len(line), LINE))


def _detected(line: str) -> Iterator[tuple[str, str]]:
    """(kind, value) of what the library's patterns find in one line."""
    for plugin in _plugins():
        for value in plugin.analyze_string(line):
            if value and SECRET not in value and value not in SECRET:
                yield plugin.secret_type, value


# Left to the patterns above: labelled values (the library's pattern takes quadratic time, and finds only the
# first in a line) and private keys (it sees the header line alone). An address is no secret.
_UNWANTED = ("High Entropy", "Keyword", "Private Key", "Public IP")


@cache
def _plugins() -> tuple[Any, ...]:
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    found: dict[str, Any] = get_mapping_from_secret_type_to_class()
    return tuple(found[kind]() for kind in sorted(found) if not any(word in kind for word in _UNWANTED))
