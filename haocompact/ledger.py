"""The offline summary: a ledger of entries, filled from the messages, never a summary of a summary.

    previous --parse--> Ledger --_Reader, one pass over the messages--> Ledger --fit--> render

An entry is one line under one heading of the seed's format, in the words of whoever said it. What `render`
writes, `parse` reads back exactly; so the next compaction goes on where this one stopped. A previous summary
that `render` did not write is carried as quoted lines under its own heading.

The order of the rules when the budget is tight: the latest request, rules, an earlier summary, the plan, what
blocks, other requests, decisions and facts, and last what was done.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from haocompact.compaction import (
    COMPACTION_SUMMARY,
    Message,
    Part,
    Shell,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
)

MIN_CHARS, MAX_CHARS, RATIO = 2_000, 12_000, 0.2
TURN_SEPARATOR = "\n\n---\n\n**Turn Context (split turn):**\n\n"
NO_HISTORY = "No prior history."
SECRET = "[secret]"

LATEST, USER, ASSISTANT, SYSTEM, TOOL = "latest", "user", "assistant", "system", "tool"
GOAL, RULE, DONE, DOING, BLOCKED = "goal", "rule", "done", "doing", "blocked"
DECISION, NEXT, FACT, EARLIER = "decision", "next", "fact", "earlier"
ASKED, EARLY, AROUND = "asked", "early", "around"


# ------------------------------------------------------------------------------------- one line of text
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_FRAME = re.compile(r"<(?=<ccr:|/?(?:read-files|modified-files|conversation|previous-summary)\b)", re.I)
_TITLE = re.compile(
    r"(?:#+ +)+(?=(?:Goal|Constraints|Progress|Done|In Progress|Blocked|Key Decisions|Next Steps|Critical Context"
    r"|Earlier Summary|Original Request|Early Progress|Context for Suffix)\b)|\*\*(?=Turn Context \(split)"
)
_TAG = re.compile(r"(?:(?:Latest request|User|System|Tool|Proposed): +)+")

_KEY_SHAPES = re.compile(
    r"\b(?:[spr]k[-_](?:live_|test_|ant-|proj-)?[\w-]{16,}|AKIA[0-9A-Z]{12,}|gh[opsur]_\w{16,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|npm_\w{30,}|hf_\w{20,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]*)?)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_BEARER = re.compile(r"\b(Bearer|Basic)( +)(?=[\w.~+/-]*\d)[\w.~+/-]{12,}=*", re.I)
_USERINFO = re.compile(r"(?<=://)([^\s/:@\[]+):([^\s/@]+)@")
_ASSIGNED = re.compile(
    r"""((?:pass(?:word|wd|phrase)|\bpwd|secret|token|(?:api|access|private|auth|signing|encryption)[_-]?key|密码|口令|密钥)
        ["'`]?\s*)(=|:|：|\bis\b|是|为)(\s*["'`]?)([^\s"'`,;，。；]{3,})""",
    re.I | re.X,
)
_CODE_VALUE = re.compile(
    r"[$<{(\[*%]|.*[(\[{]|(?:none|null|true|false|str|string|undefined|required|optional)\b", re.I
)


def clean(text: str) -> str:
    """One safe line: no control characters, no forged structure, no secrets. `clean(clean(x)) == clean(x)`."""
    for _ in range(4):
        before, text = text, _clean_once(text)
        if text == before:
            break
    return text


def _clean_once(text: str) -> str:
    text = " ".join(_ANSI.sub("", text).split())
    text = _SURROGATE.sub("\ufffd", _CONTROL.sub("", text))
    text = _TITLE.sub("", _FRAME.sub("‹", text))
    tag = _TAG.match(text)
    return mask_secrets(text[tag.end() :] if tag else text).strip()


def mask_secrets(text: str) -> str:
    """Replace the values of secrets, keep their names: `api_key=[secret]`."""
    text = _BEARER.sub(rf"\1\2{SECRET}", _KEY_SHAPES.sub(SECRET, text))
    text = _USERINFO.sub(rf"\1:{SECRET}@", text)
    return _ASSIGNED.sub(_mask_assigned, text)


def _mask_assigned(match: re.Match[str]) -> str:
    name, sign, gap, value = match.groups()
    has_digit = any(c.isdigit() for c in value)
    plain = name.lower().startswith(("pass", "pwd", "密码", "口令")) and sign in "=:："
    if SECRET in value or _CODE_VALUE.match(value) or not (plain or (has_digit and len(value) >= 6)):
        return match.group()
    return f"{name}{sign}{gap}{SECRET}"


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
    tail = (limit - 3) // 3
    start = len(text) - tail
    while start < len(text) and not _is_boundary(text, start):
        start += 1
    return f"{cut(text, limit - 1 - len(text[start:]))} {text[start:].lstrip()}".strip()


def _is_boundary(text: str, index: int) -> bool:
    left, right = text[index - 1], text[index]
    joined = (
        unicodedata.combining(right) or right in "\u200d\ufe0f" or left == "\u200d" or "🏻" <= right <= "🏿"
    )
    return not joined and not (_is_word(left) and _is_word(right))


def _is_word(char: str) -> bool:
    return char < "\u2e80" and (char.isalnum() or char in "_./:@#-%$\\=+~&?")


# ------------------------------------------------------------------------------------- words and values
_TOKEN = re.compile(r"[\w$~@#%./:+\\-]*[\w%]", re.A)
_HAN = re.compile("[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]+")
_HAN_NUMBER = re.compile(
    "[零一二两三四五六七八九十百千万半]+(?:个|次|天|日|秒|分钟|小时|行|页|元|倍|层|周|月|年|条|台|份|种|人|号)|周[一二三四五六日]"
)
_NUMBER_WORDS = frozenset(
    "one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty sixty hundred "
    "thousand million half twice once double triple quarterly weekly daily monthly monday tuesday wednesday thursday "
    "friday saturday sunday january february march april june july august september october november december".split()
)
_STOP = frozenset(
    "the a an and or but if then than that this these those there here it its is are was were be been being am do does "
    "did done doing have has had having will would shall should can could may might must not no nor of in on at to for "
    "from by with without into onto over under about as so such too very just also only even still yet again more most "
    "less least some any all each every both either neither other another own same you your yours we our ours us i me "
    "my mine he she they them their his her who whom which what when where why how let lets please make made get got "
    "use used using want wants need needs like actually instead now rather change changed switch sure ok okay yes never "
    "always dont don doesn isn cant won first last new old thing things way going go one ones up down out off per via "
    "because since while after before until them really think know see say said put keep kept set".split()
)


def values_of(text: str) -> dict[str, str]:
    """The exact tokens of a sentence, lower case, each with its class: num, id, name or word."""
    found: dict[str, str] = {}
    for index, match in enumerate(_TOKEN.finditer(text)):
        token = match.group().strip(".:-")
        kind = _value_class(token, index == 0)
        if kind:
            found[token.lower()] = kind
    if not text.isascii():
        found.update(dict.fromkeys(_HAN_NUMBER.findall(text), "num"))
    return found


def _value_class(token: str, at_start: bool) -> str:
    if token[:1].isdigit() or (token[:1] in "$~+-" and token[1:2].isdigit()):
        return "num"
    if any(c.isdigit() for c in token) or any(c in "_/@" for c in token[1:]):
        return "id"
    if token.lower() in _NUMBER_WORDS:
        return "word"
    inner = token[1:]
    if len(token) > 1 and (not inner.islower() and any(c.isupper() for c in inner)) or "." in inner:
        return "id"
    return "name" if token[:1].isupper() and not at_start and len(token) > 1 else ""


def stems_of(text: str) -> set[str]:
    """The words that say what a sentence is about: no stop words, no endings; Chinese by pairs."""
    lower = text.lower()
    stems = {_stem(w) for w in re.findall(r"[a-z][a-z'’]+", lower) if w not in _STOP and len(w) > 2}
    for run in _HAN.findall(text) if not text.isascii() else ():
        stems.update(run[i : i + 2] for i in range(len(run) - 1) if not _HAN_STOP.search(run[i : i + 2]))
    return stems - {""}


_HAN_STOP = re.compile("[的了是不要把成为在和请就都也还只别能会将我你他这那个上下用改换]")


def _stem(word: str) -> str:
    for ending in ("ies", "ing", "ed", "es", "s", "ly", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


# ------------------------------------------------------------------------------------- sentences
_END = re.compile(
    r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\betc\.)(?<!\bvs\.)(?<!\bno\.)\s+|(?<=[。！？；])\s*"
)
_WRAP = re.compile(r"(?<=[\w,)])\n(?=[a-z])")
_BULLET = re.compile(
    r"\s*(?:[-*•+]|\d{1,2}[.)、]|[（(]\d{1,2}[)）])\s+(?:\[([ xX~])\]\s*)?|\s*#{1,6}\s+|\s*>\s?"
)
_CODE = re.compile(r"[{}();=<>|\\\[\]]")


@dataclass(frozen=True, slots=True)
class Sentence:
    """`lead`: the line ending with a colon above the list it stands in."""

    text: str
    lead: str = ""
    bullet: bool = False


def sentences(text: str) -> Iterator[Sentence]:
    """Sentences of prose; fenced code and lines that look like code or logs are left out."""
    lead, fenced = "", False
    for line in _WRAP.sub(" ", text).split("\n"):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and line.strip():
            bullet = _BULLET.match(line)
            body = line[bullet.end() :] if bullet else line.strip()
            if body.rstrip("* ").endswith((":", "：")):
                lead = body
            elif not bullet:
                lead = ""
            if looks_like_prose(body):
                yield from (Sentence(s, lead, bool(bullet)) for s in _END.split(body) if s and len(s) > 2)


def looks_like_prose(line: str) -> bool:
    """Words with few code marks: `x = f(y);` and `at foo (a.js:1:2)` are none."""
    marks = len(_CODE.findall(line))
    if not line.isascii() and _HAN.search(line):
        return marks * 6 <= len(line)
    return marks * 12 <= len(line) and not line.startswith(
        ("at ", 'File "', "+++", "---", "@@", "|", "import ")
    )


# ------------------------------------------------------------------------------------- what a sentence is
def _words(text: str) -> re.Pattern[str]:
    return re.compile(text, re.I)


_STRONG = _words(
    r"\b(?:must(?:n['’]?t)?|never|always|do ?n[o'’]t|don['’]t|does ?n[o'’]t have to|may not|cannot|can['’]?t|shall|"
    r"not (?:allowed|permitted|acceptable)|nobody|no one|nothing|forbidden|prohibited|banned?|mandatory|at (?:most|least)|"
    r"no (?:more|less|later|fewer|longer) than|under no|off[- ]limits|hands off|strictly|without exception|only|"
    r"has to|have to|should(?:n['’]?t)?|ought to|required?|requirement|prefer\w*|avoid|refrain|leave .{1,40} alone|"
    r"deadline|budget|from now on|going forward|make sure|ensure|remember|instead of|rather than|unless|"
    r"house (?:rule|style)|convention|policy)\b"
    r"|必须|不要|不能|不得|不可|禁止|只能|只用|只准|务必|一定要|总是|永远|千万|绝不|绝对|别[^的人]|尽量|优先|最好|不超过|至少|最多|以内|截止|"
    r"预算|应该|应当|统一|一律|不许|不准|避免|记住|每次都|必ず|絶対|しないで|禁止|のみ|ないこと|べき|以内|優先|常に|てください|"
    r"반드시|절대|하지 ?마|마세요|항상|금지|해야|이내|우선|꼭"
)
_WEAK = _words(
    r"\b(?:keep|stick|use|using|using|every\w*|all|each|any|none?|without|whenever|until|before|within|max\w*|min\w*|limit\w*|"
    r"cap|up to|less than|fewer than|under|name[ds]?|call(?:ed)?|leave|treat|wants?|likes?|hates?|loves?|"
    r"needs? to|need|in (?:english|german|french|chinese|japanese|korean|spanish)|by (?:the )?(?:end|mon|tue|wed|thu|fri|sat|sun|"
    r"next|tomorrow|jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|\d)\w*|goes|stays?|lives?|belongs?|"
    r"expects?|supposed to|allergic|favou?r|style|rather|target|support)\b"
    r"|请用|使用|喜欢|偏好|想要|需要|所有|每个|每次|都要|保持|放在|之前|之后|以下|以上|不用|习惯|希望|支持"
)
_GOAL = _words(
    r"\b(?:goal|aim|objective|purpose|target is|trying to|(?:we|i) (?:want|need|hope|plan|intend)|i['’]d like|the point (?:is|of)|"
    r"so that|end up with|ultimately|eventually|the idea is|mission|deliverable|the task|your (?:task|job)|aiming|get .{3,40} working)\b"
    r"|目标|目的|想要|希望|任务|最终|打算|計画|目標|목표"
)
_DECISION = _words(
    r"\b(?:decid\w+|decision|cho[os]s?e\w*|choice|settled? (?:on|for)|opt(?:ed|ing)? (?:for|to)|went with|go(?:ing)? with|"
    r"picked|pick|ruled out|reject\w*|trade-?off|instead of|rather than|because|turn(?:s|ed) out|root cause|the reason|"
    r"agreed|conclu\w+|plan(?:ned)? to|which is why|therefore|dropped|kept|adopt\w*|switch\w*)\b"
    r"|决定|选择|选用|采用|因为|之所以|改用|原因|结论|选定|放弃|決定|採用|ため|결정|선택|때문"
)
_STATES = _words(
    r"\b(?:is|are|was|were|has|had|uses?|used|runs?|ran|listens?|expires?|returns?|stores?|stored|takes?|took|costs?|"
    r"lives?|sits?|needs?|requires?|accepts?|allows?|rejects?|supports?|contains?|holds?|holding|belongs?|owns?|owned|handles?|"
    r"measured|found|points?|defaults?|set to|called|named|comes?|came|falls?|drops?|fails?|failed|means|starts?|"
    r"ends?|became|equals|sends?|caps?|capped|limited|reached|peaked|averages?|lasts?|lags?|remains?|seen|reported)\b|是|为|在|有|用|需|耗时|位于|达到|超过|低于|です|ます|입니다"
)
_NARRATION = re.compile(
    r"(?:now,? )?(?:let me|let['’]s|i['’]ll|i will|i['’]m going|i need to|i should|i can see|i see|next,|first,|perfect|great|good|excellent|"
    r"done|ok(?:ay)?\b|sure|looking|checking|here['’]s|here (?:is|are)|the user|you['’]re right|wait|hmm|thank|sorry|now i|"
    r"would you|do you|shall i|what would|让我|我来|现在|好的|接下来|首先|我会|我将)",
    re.I,
)
_DID = re.compile(
    r"(?:i['’]ve |i (?:have |just )?|all |we )?(?:updated?|added|fixed|removed?|created|changed|moved|renamed|implemented|refactored|wrote|"
    r"rewrote|committed|pushed|deleted|replaced|extracted|installed|cleaned|verified|completed|已|完成|修复了|添加了|新增)\b",
    re.I,
)
_ASKS = re.compile(
    r"(?:can|could|would|will|what|why|how|where|when|who|which|is|are|do|does|did|should|any)\b|(?:怎么|为什么|什么|能不能|可以.*吗)",
    re.I,
)
_ORDERS = re.compile(
    r"(?:please |now |then |and |also |ok,? |alright,? |btw,? )*(?:fix|add|create|read|look|check|show|update|implement|refactor|"
    r"continue|write|run|find|give|tell|explain|remove|delete|make|start|try|do|commit|push|open|move|copy|build|test|review)\b",
    re.I,
)
_CORRECTS = _words(
    r"\b(?:actually|instead|no longer|not .{1,30} (?:but|any ?more)|scratch that|forget|chang\w+|switch\w*|swap\w*|replac\w+|correction|"
    r"on second thou?ght|i (?:was wrong|misspoke|meant)|rather|make (?:it|that|them)|revis\w+|supersed\w+|renam\w+|mov(?:e|ed|ing) .{1,40} to|"
    r"bump\w*|rais\w+|lower\w*|increas\w+|reduc\w+|extend\w*|push(?:ed)? (?:back|out)|updat\w+|wrong|mistake|overrid\w+|drop|after all|"
    r"new (?:value|number|limit|name|date|deadline|plan)|from .{1,30} to|turns out|not right|outdated|stale|now)\b"
    r"|改成|改为|换成|改用|其实|更正|不再|不用了|取消|调整|应为|而不是|说错|搞错|変更|訂正|代わりに|실은|변경|대신"
)
_TOOL_CUE = _words(
    r"\b(?:note|warning|important|limit\w*|expires?|expir\w+|deadline|only|requires?|required|default\w*|must|max\w*|min\w*|"
    r"deprecated|port|version|quota|owner|scheduled|until|since|budget|retention|timeout|endpoint|threshold|reserved|locked|"
    r"unsupported|disabled|enabled|frozen|maintenance|contact)\b|注意|警告|限制|到期|默认|必须|版本|端口|上限"
)
_NEXT_LEAD = _words(
    r"\b(?:next steps?|remaining|still to do|to ?do|what(?:'s| is) left|plan)\b|下一步|待办|剩余|接下来|計画|次の"
)


def judge_user(sentence: Sentence) -> tuple[str, float]:
    """(kind, weight) of one sentence of the user. Rules weigh most, a bare question least."""
    text = sentence.text
    values = len(values_of(text))
    rule = 3.0 * bool(_STRONG.search(text)) + min(2, len(_WEAK.findall(text)))
    if sentence.lead and not rule and _STRONG.search(sentence.lead):
        rule = 3.0
    goal = bool(_GOAL.search(text))
    question = text.endswith(("?", "？")) or bool(_ASKS.match(text))
    fit = min(values, 3) * 0.7 - (len(text) > 240) - 2 * (len(text) < 12)
    if question and not (rule >= 3 and not text.endswith(("?", "？"))):
        return GOAL, 2 + fit + goal
    if goal and rule < 4:
        return GOAL, 7.5 + fit
    if rule and not (_ORDERS.match(text) and rule < 3):
        return RULE, 5 + rule + fit
    if values and _STATES.search(text) and not _ORDERS.match(text):
        return FACT, 5.5 + fit
    return GOAL, 3.5 + fit


def judge_assistant(sentence: Sentence) -> tuple[str, float]:
    """(kind, weight) of one sentence of the assistant; weight below zero: narration, not kept."""
    text = sentence.text
    values = values_of(text)
    weight = min(len(values), 4) * 0.8 + 0.8 * bool(_STATES.search(text)) + 0.5 * bool(_STRONG.search(text))
    weight -= 0.8 * sentence.bullet + 0.5 * (text.count("`") > 2) + 0.5 * ("**" in text)
    weight -= (len(text) > 220) + 2 * (len(text) < 30) + 3 * text.endswith((":", "：", "?", "？"))
    decided = _DECISION.search(text)
    if _NARRATION.match(text) and not (decided and values):
        return FACT, weight - 4
    if _DID.match(text) and not decided:
        return DONE, weight - 1
    if decided:
        return DECISION, weight + 1.5
    return FACT, weight


def judge_tool(line: str) -> float:
    """Weight of one line of a tool's output as a fact in plain words."""
    values = values_of(line)
    weight = min(len(values), 3) * 0.7 + 1.2 * bool(_STATES.search(line)) + bool(_TOOL_CUE.search(line))
    weight += 0.8 * line.endswith((".", "。")) + 0.5 * line[:1].isupper()
    weight -= min(3.0, 0.5 * len(_CODE.findall(line))) + (len(line) > 200) + 0.4 * line.count("`")
    return weight


# ------------------------------------------------------------------------------------- entries
@dataclass(slots=True, eq=True)
class Entry:
    """One line of the ledger. Two entries are equal when they render equally."""

    kind: str
    text: str
    who: str = ""
    weight: float = field(default=0.0, compare=False)
    key: str = field(default="", compare=False)
    gone: bool = field(default=False, compare=False)
    values: dict[str, str] = field(default_factory=dict, compare=False)
    stems: set[str] = field(default_factory=set, compare=False)


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, the kind of its entries, who says them unless tagged, and how a line starts."""

    heading: str
    kind: str
    who: str
    bullet: str = "- "
    none: bool = False


SECTIONS = (
    Section("## Goal", GOAL, USER),
    Section("## Constraints & Preferences", RULE, USER, none=True),
    Section("### Done", DONE, ASSISTANT, "- [x] "),
    Section("### In Progress", DOING, ASSISTANT, "- [ ] "),
    Section("### Blocked", BLOCKED, TOOL),
    Section("## Key Decisions", DECISION, ASSISTANT),
    Section("## Next Steps", NEXT, USER, "1. "),
    Section("## Critical Context", FACT, ASSISTANT, none=True),
    Section("## Earlier Summary", EARLIER, SYSTEM, "> "),
)
TURN_SECTIONS = (
    Section("## Original Request", ASKED, USER, ""),
    Section("## Early Progress", EARLY, ASSISTANT),
    Section("## Context for Suffix", AROUND, ASSISTANT),
)
_BY_HEADING = {s.heading: s for s in (*SECTIONS, *TURN_SECTIONS)}
_BY_KIND = {s.kind: s for s in (*SECTIONS, *TURN_SECTIONS)}
TAGS = {
    LATEST: "Latest request: ",
    USER: "User: ",
    SYSTEM: "System: ",
    TOOL: "Tool: ",
    ASSISTANT: "Proposed: ",
}
_LEFT_OUT = re.compile(r"\((\d+) older entries are only in the original\)")


def line_of(entry: Entry) -> str:
    """The entry as it stands under its heading (numbers of a numbered list are put in by `render`)."""
    section = _BY_KIND[entry.kind]
    tag = "" if entry.who == section.who else TAGS.get(entry.who, "")
    return f"{section.bullet}{tag}{entry.text}"


_COMMAND = re.compile(r"`([^`]+)` (failed|ok)\b")
_EDITED = re.compile(r"Edited `([^`]+)`(?: \((\d+) times\))?$")


def key_of(kind: str, text: str) -> str:
    """What makes two entries the same: the command, the file, or the words themselves."""
    command = _COMMAND.match(text) if kind in (DONE, BLOCKED, EARLY) else None
    if command:
        return "`" + signature(command[1])
    edited = _EDITED.match(text) if kind in (DONE, EARLY) else None
    if edited:
        return "e" + edited[1]
    return "=resolved" if text.startswith("Resolved: ") else re.sub(r"[\W_]+", " ", text.casefold()).strip()


class Ledger:
    """Entries in order of time. `left_out` counts those that found no room, here and in earlier rounds."""

    CAP = 300  # entries kept of one kind by one speaker while reading; a summary has room for about a hundred

    def __init__(self, entries: Iterable[Entry] = (), left_out: int = 0) -> None:
        self.entries: list[Entry] = []
        self.left_out = left_out
        self.seen: Counter[str] = Counter()
        self._by_key: dict[str, Entry] = {}
        self._by_stem: dict[str, deque[Entry]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            self._append(entry)

    @classmethod
    def of(cls, previous: str | None) -> Ledger:
        """The ledger that a previous summary holds, whoever wrote it."""
        text = (previous or "").strip()
        ledger = parse(text) if text else cls()
        return ledger if ledger is not None else cls(_quoted(text))

    def live(self) -> list[Entry]:
        return [e for e in self.entries if not e.gone]

    def find(self, *kinds: str) -> list[Entry]:
        return [e for e in self.entries if e.kind in kinds and not e.gone]

    def drop(self, *kinds: str, who: str | None = None) -> None:
        for entry in self.find(*kinds):
            entry.gone = entry.gone or who is None or entry.who == who

    def add(self, kind: str, text: str, who: str, weight: float = 1.0, *, limit: int = 320) -> Entry | None:
        """Add one entry unless it stands there already; what it corrects or repeats gives way."""
        line = cut(clean(text), limit)
        if not line or line == "(none)":
            return None
        entry = Entry(kind, line, who, weight, key_of(kind, line))
        known = self._by_key.get(entry.key) if entry.key else None
        if known is not None and not known.gone and not self._gives_way(known, entry):
            known.weight = max(known.weight, weight)
            return known
        return self._append(entry)

    def _gives_way(self, known: Entry, entry: Entry) -> bool:
        """A keyed entry is replaced by its newer state; a fact by the user's own word for it."""
        replaced = known.key[:1] in "`e=" or known.kind in (DOING, NEXT) or (entry.who == USER != known.who)
        known.gone = known.gone or replaced
        return replaced

    def _append(self, entry: Entry) -> Entry:
        entry.key = entry.key or key_of(entry.kind, entry.text)
        if entry.kind in _ABOUT and entry.who != LATEST:
            entry.values, entry.stems = values_of(entry.text), stems_of(entry.text)
            self.seen.update(entry.values.keys())
            self._supersede(entry)
            for stem in entry.stems:
                self._by_stem.setdefault(stem, deque(maxlen=48)).append(entry)
        if entry.who != LATEST and entry.kind != ASKED:
            self._by_key[entry.key] = entry
        self.entries.append(entry)
        self._counts[entry.kind, entry.who] += 1
        if self._counts[entry.kind, entry.who] > 2 * self.CAP:
            self._prune(entry.kind, entry.who)
        return entry

    def _supersede(self, entry: Entry) -> None:
        if entry.who not in (USER, ASSISTANT) or entry.kind == EARLIER:
            return
        corrects = bool(_CORRECTS.search(entry.text))
        near = Counter(id(old) for stem in entry.stems for old in self._by_stem.get(stem, ()))
        by_id = {id(old): old for stem in entry.stems for old in self._by_stem.get(stem, ())}
        for found, shared in near.items():
            old = by_id[found]
            if entry.who == USER or old.who in (ASSISTANT, TOOL):
                old.gone = old.gone or _replaces(entry, old, shared, corrects)

    def _prune(self, kind: str, who: str) -> None:
        """Keep the heaviest half of one kind, so that memory stays the same however long the input."""
        same = [e for e in self.entries if (e.kind, e.who) == (kind, who)]
        live = [e for e in same if not e.gone]
        ranked = sorted(
            enumerate(live), key=lambda p: (p[1].weight + 2 * p[0] / len(live), p[0]), reverse=True
        )
        for _, entry in ranked[self.CAP :]:
            entry.gone = True
            self.left_out += 1
        self.entries = [e for e in self.entries if not (e.gone and (e.kind, e.who) == (kind, who))]
        self._counts[kind, who] = min(len(live), self.CAP)
        for entry in same:
            if entry.gone and self._by_key.get(entry.key) is entry:
                del self._by_key[entry.key]


_ABOUT = frozenset((GOAL, RULE, FACT, DECISION, EARLIER, AROUND))


def _replaces(new: Entry, old: Entry, shared: int, corrects: bool) -> bool:
    """Does `new` give another value for what `old` is about?"""
    fresh = {v for v in new.values if v not in old.values}
    lost = {v for v in old.values if v not in new.values}
    same_class = {new.values[v] for v in fresh} & {old.values[v] for v in lost}
    smaller = min(len(new.stems), len(old.stems))
    if corrects:
        named = any(v in old.values for v in new.values) and bool(fresh)
        if named and shared >= 2:
            return True
        return (
            2 * shared >= smaller
            and (shared >= 2 or smaller <= 2)
            and bool(same_class or not (fresh and lost))
        )
    contained = shared == smaller and shared >= 2
    return contained and 5 * shared >= 3 * max(len(new.stems), len(old.stems)) and bool(same_class)


def _quoted(text: str) -> list[Entry]:
    lines = (clean(line) for line in text.split("\n"))
    return [Entry(EARLIER, line, SYSTEM) for line in lines if line]


# ------------------------------------------------------------------------------------- text <-> ledger
def render(ledger: Ledger, *, spare: bool = False) -> str:
    """The seed's section format. `spare` leaves out the sections that would only say "(none)"."""
    body = _render_sections(SECTIONS, ledger, spare)
    if ledger.left_out and body:
        body += f"\n\n({ledger.left_out} older entries are only in the original)"
    if not any(e.kind in (ASKED, EARLY, AROUND) for e in ledger.live()):
        return body or "## Goal\n- (none)"
    main = body if any(e.kind in _MAIN for e in ledger.live()) or ledger.left_out else NO_HISTORY
    return (main or NO_HISTORY) + TURN_SEPARATOR + _render_sections(TURN_SECTIONS, ledger, True)


_MAIN = frozenset(s.kind for s in SECTIONS)


def _render_sections(sections: tuple[Section, ...], ledger: Ledger, spare: bool) -> str:
    blocks: list[str] = []
    progress = False
    for section in sections:
        lines = [line_of(e) for e in ledger.find(section.kind)]
        if section.kind == NEXT:
            lines = [f"{n}. {line[3:]}" for n, line in enumerate(lines, 1)]
        if not lines and section.none and not spare:
            lines = ["- (none)"]
        if lines:
            head = section.heading
            if head.startswith("### ") and not progress:
                head, progress = f"## Progress\n{head}", True
            blocks.append("\n".join((head, *lines)))
    return "\n\n".join(blocks)


def parse(text: str) -> Ledger | None:
    """The ledger that `render` made this text from; None when it made no such text."""
    entries: list[Entry] = []
    section: Section | None = None
    left_out = 0
    for line in text.split("\n"):
        section = _BY_HEADING.get(line, section)
        counted = _LEFT_OUT.fullmatch(line)
        left_out = int(counted[1]) if counted and len(counted[1]) < 12 else left_out
        entry = _parse_line(line, section) if section else None
        if entry is not None:
            entries.append(entry)
    if any(clean(e.text) != e.text for e in entries):
        return None
    ledger = Ledger(left_out=left_out)
    for entry in entries:
        entry.weight = weigh(entry)
        ledger.entries.append(entry)
    if text not in (render(ledger), render(ledger, spare=True)):
        return None
    return Ledger(entries, left_out)


def _parse_line(line: str, section: Section) -> Entry | None:
    bullet = "1. " if section.kind == NEXT else section.bullet
    if section.kind == NEXT:
        line = re.sub(r"^\d+\. ", bullet, line, count=1)
    text = line.removeprefix(bullet)
    if text == line or not text or text == "(none)":
        return None
    for who, tag in TAGS.items():
        if text.startswith(tag) and who != section.who:
            return Entry(section.kind, text[len(tag) :], who)
    return Entry(section.kind, text, section.who)


def weigh(entry: Entry) -> float:
    """The weight of an entry read back, from its words alone; having been kept before counts a little."""
    sentence = Sentence(entry.text)
    if entry.kind in (GOAL, RULE, FACT, DECISION) and entry.who in (USER, SYSTEM):
        return max(judge_user(sentence)[1], {RULE: 6.0, FACT: 5.5}.get(entry.kind, 2.0))
    if entry.kind == EARLIER:
        return max(judge_user(sentence)[1], judge_assistant(sentence)[1])
    if entry.who == TOOL and entry.kind in (FACT, AROUND):
        return judge_tool(entry.text) + 0.7
    return max(judge_assistant(sentence)[1], 1.0) + 0.7


# ------------------------------------------------------------------------------------- the budget
@dataclass(frozen=True, slots=True)
class Pool:
    """Entries that compete with each other. `share` of the budget is theirs before others may fill up."""

    share: float
    members: frozenset[tuple[str, str]]
    recency: float = 1.0


def _pool(share: float, kinds: Iterable[str], *who: str, recency: float = 1.0) -> Pool:
    return Pool(share, frozenset((k, w) for k in kinds for w in who), recency)


ANYONE = (USER, ASSISTANT, SYSTEM, TOOL)
POOLS = (
    _pool(0.4, (RULE,), USER),
    _pool(0.5, (EARLIER,), SYSTEM),
    _pool(0.1, (DOING,), *ANYONE, recency=0),
    _pool(0.1, (NEXT,), *ANYONE, recency=0),
    _pool(0.08, (BLOCKED,), *ANYONE, recency=9),
    _pool(0.2, (FACT, DECISION), USER),
    _pool(0.16, (GOAL,), USER, recency=2),
    _pool(0.24, (DECISION, FACT), ASSISTANT),
    _pool(0.12, (FACT,), TOOL),
    _pool(0.06, (RULE,), SYSTEM),
    _pool(0.1, (EARLY,), *ANYONE, recency=9),
    _pool(0.1, (AROUND,), *ANYONE),
    _pool(0.06, (DONE,), *ANYONE, recency=9),
)


def fit(ledger: Ledger, budget: int) -> Ledger:
    """What of the ledger goes into `budget` characters."""
    entries = _visible(ledger)
    fixed = [e for e in entries if e.who == LATEST or e.kind == ASKED]
    room = budget - _overhead(entries, budget) - sum(len(line_of(e)) + 1 for e in fixed)
    chosen = {id(e) for e in fixed}
    scored = [_ranked(pool, entries, ledger.seen) for pool in POOLS]
    for pool, ranked in zip(POOLS, scored, strict=True):
        room -= _take(ranked, min(room, int(pool.share * budget)), chosen)
    _take(sorted((x for ranked in scored for x in ranked), key=lambda x: (-x[0], x[1])), room, chosen)
    kept = [e for e in entries if id(e) in chosen]
    return Ledger(kept, ledger.left_out + len(entries) - len(kept))


def _visible(ledger: Ledger) -> list[Entry]:
    """Live entries, without requests that the latest one holds word for word."""
    latest = " ".join(e.text for e in ledger.live() if e.who == LATEST or e.kind == ASKED)
    return [e for e in ledger.live() if not (e.kind == GOAL and e.who == USER and e.text in latest)]


def _overhead(entries: list[Entry], budget: int) -> int:
    kinds = {e.kind for e in entries}
    heads = sum(
        len(s.heading) + 2 for s in _BY_KIND.values() if s.kind in kinds or (s.none and budget >= SPARE)
    )
    turn = len(TURN_SEPARATOR) + len(NO_HISTORY) if kinds & {ASKED, EARLY, AROUND} else 0
    return heads + turn + len("## Progress\n") + 60


SPARE = 700
Ranked = tuple[float, int, Entry]


def _ranked(pool: Pool, entries: list[Entry], seen: Mapping[str, int]) -> list[Ranked]:
    """(score, position, entry), best first: weight, how recent, and how rare its values are."""
    mine = [e for e in entries if (e.kind, e.who) in pool.members]
    last = max(len(mine) - 1, 1)
    scored = []
    for index, entry in enumerate(mine):
        score = entry.weight + pool.recency * index / last + _rarity(entry, seen)
        score += 4 * (entry.kind == GOAL and index == 0)
        scored.append((score, -index, entry))
    return sorted(scored, key=lambda x: (-x[0], x[1]))


def _rarity(entry: Entry, seen: Mapping[str, int]) -> float:
    counts = [seen.get(v, 1) for v in entry.values]
    return max(-1.0, min(1.2, 0.4 * sum(c <= 1 for c in counts) - 0.3 * sum(c > 4 for c in counts)))


def _take(ranked: Iterable[Ranked], room: int, chosen: set[int]) -> int:
    used = 0
    for _, _, entry in ranked:
        cost = len(line_of(entry)) + 1
        if id(entry) not in chosen and used + cost <= room:
            chosen.add(id(entry))
            used += cost
    return used


# ------------------------------------------------------------------------------------- reading messages
_OPENING = re.compile(r"<([A-Za-z][\w-]*)\b[^<>]*>")
_INJECTED = frozenset(
    "instructions environment output stdout stderr returncode context documents attachment observation reminder".split()
)
_NOT_A_REQUEST = (
    "Caveat: The messages below", "[Request interrupted", "# AGENTS.md instructions", "This session is being continued",
    "Another language model started",
)  # fmt: skip
_OBSERVED = (
    "OBSERVATION:",
    "Observation:",
    "EXECUTION RESULT",
    "Exit code:",
    "Tool result:",
    "Command output:",
)


def without_injected(text: str) -> str:
    """The user's own words: markup that a client put around or between them is left out. Linear time."""
    if "</" not in text:
        return text
    kept, position, unclosed = [], 0, set()
    for match in _OPENING.finditer(text):
        tag = match[1].lower()
        if match.start() < position or tag in unclosed or not (tag in _INJECTED or "-" in tag or "_" in tag):
            continue
        end = text.find(f"</{match[1]}>", match.end()) if len(unclosed) < 50 else -1
        if end < 0:
            unclosed.add(tag)
            continue
        kept.append(text[position : match.start()])
        position = end + len(match[1]) + 3
    return "".join((*kept, text[position:]))


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool was asked to do: `label` names it, `path` when it edits a file."""

    label: str = "tool"
    command: str = ""
    path: str = ""


class _Reader:
    """Fills a ledger from messages, one at a time; holds nothing of a message but its entries."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.in_turn = False
        self.chars = 0
        self.messages = 0
        self._calls: dict[str | None, Call] = {}
        self._tasks: dict[str, tuple[str, str]] = {}
        self._planned = False

    def read(self, message: Message) -> None:
        if message.hidden:
            return
        if not self.messages:
            _fold_turn(self.ledger)
        self.messages += 1
        for part in message.parts:
            self.chars += _length(part)
            if isinstance(part, Text):
                self._text(message, part.text)
            elif isinstance(part, ToolCall):
                self._call(part)
            elif isinstance(part, ToolResult):
                self._result(
                    self._calls.pop(part.id, Call(part.name or "tool")), "\n".join(part.texts), part.is_error
                )
            elif isinstance(part, Shell):
                failed = _exit_code(part.status)
                self._result(_command_call("bash", part.command), part.output, bool(failed))

    # -- what was said
    def _text(self, message: Message, text: str) -> None:
        if message.kind == COMPACTION_SUMMARY or (message.role == "system" and text.startswith("## Goal\n")):
            self._absorb(text)
        elif message.role == "user":
            self._user(without_injected(text).strip())
        elif message.role in ("assistant", "branchSummary"):
            self._assistant(text)
        elif message.role == "system":
            self._system(text)
        else:
            self._facts(text)

    def _absorb(self, text: str) -> None:
        """A summary that stands among the messages is taken in as the previous one is."""
        body = re.split(r"\n\n(?=<read-files>\n|<modified-files>\n|<<ccr:)", text.strip())[0]
        other = Ledger.of(body)
        _fold_turn(other)
        self.ledger.left_out += other.left_out
        for entry in other.live():
            if entry.who == LATEST:
                self._demote()
            self.ledger._append(entry)

    def _user(self, text: str) -> None:
        if not text or text.startswith(_NOT_A_REQUEST):
            return
        if text.startswith(_OBSERVED):
            self._result(Call(), text, False)
            return
        self._demote()
        if self.in_turn:
            self.ledger.drop(ASKED)
        self._sentences(text)
        latest = cut_middle(clean(text), 4 * MAX_CHARS)
        if latest and latest != "(none)":
            self.ledger._append(
                Entry(ASKED if self.in_turn else GOAL, latest, USER if self.in_turn else LATEST)
            )

    def _demote(self) -> None:
        """The request that was the latest becomes one of the requests."""
        for entry in self.ledger.find(GOAL):
            if entry.who == LATEST:
                entry.gone = True
                self._sentences(entry.text)

    def _sentences(self, text: str) -> None:
        for sentence in sentences(text):
            kind, weight = judge_user(sentence)
            if weight >= 2 or sentence.text == text:
                self.ledger.add(kind, sentence.text, USER, weight)

    def _system(self, text: str) -> None:
        for sentence in sentences(text):
            kind, weight = judge_user(sentence)
            if kind == RULE:
                self.ledger.add(RULE, sentence.text, SYSTEM, weight - 3)

    def _assistant(self, text: str) -> None:
        self._checklist(text)
        proposed = False
        for sentence in sentences(text):
            if sentence.bullet and sentence.lead and _NEXT_LEAD.search(sentence.lead):
                if not proposed:
                    self.ledger.drop(NEXT, who=ASSISTANT)
                proposed = True
                self.ledger.add(NEXT, sentence.text, ASSISTANT, limit=200)
                continue
            kind, weight = judge_assistant(sentence)
            if weight >= 1.5:
                self.ledger.add(self._placed(kind), sentence.text, ASSISTANT, weight)

    def _placed(self, kind: str) -> str:
        """In the first half of a split turn, work and facts stand in its own block."""
        return {DONE: EARLY, DECISION: EARLY, FACT: AROUND}.get(kind, kind) if self.in_turn else kind

    # -- plans
    def _checklist(self, text: str) -> None:
        if self._planned or "[ ]" not in text:
            return
        boxes = _CHECKBOX.findall(text)
        if len(boxes) >= 2:
            self._plan(
                [({" ": "pending", "~": "in_progress"}.get(mark, "completed"), item) for mark, item in boxes]
            )

    def _plan(self, items: list[tuple[str, str]]) -> None:
        """The last state of a plan replaces the one before; what it completed is done."""
        self.ledger.drop(DOING, NEXT)
        for status, text in items:
            kind = _STATUS.get(status.lower().replace("-", "_"), NEXT)
            if kind:
                self.ledger.add(kind, text, {NEXT: USER}.get(kind, ASSISTANT), 2.0, limit=200)

    def _task(self, arguments: Mapping[str, object]) -> None:
        """Single tasks: created by subject, later updated by number."""
        number = str(arguments.get("taskId") or len(self._tasks) + 1)
        status, subject = self._tasks.get(number, ("pending", ""))
        subject = str(arguments.get("subject") or subject)
        self._tasks[number] = str(arguments.get("status") or status), subject
        self._plan([(s, t) for s, t in self._tasks.values() if t and s != "deleted"])

    # -- what was done
    def _call(self, part: ToolCall) -> None:
        arguments = part.arguments if isinstance(part.arguments, dict) else {"input": part.arguments}
        name = part.name.rsplit("__", 1)[-1].rsplit(".", 1)[-1]
        if name in ("TaskCreate", "TaskUpdate"):
            self._planned = True
            self._task(arguments)
        items = plan_items(arguments)
        if items:
            self._planned = True
            self._plan(items)
        if len(self._calls) > 1000:
            self._calls.clear()
        self._calls[part.id] = call_of(name, arguments)

    def _result(self, call: Call, text: str, is_error: bool) -> None:
        failed = is_error or _looks_failed(call, text)
        key = "`" + signature(call.label)
        if failed:
            self.ledger.add(BLOCKED, f"`{call.label}` failed: {error_line(text)}", TOOL, 2.0)
        else:
            self._resolve(key)
            self._did(call, text)
        self._facts(text)

    def _resolve(self, key: str) -> None:
        for entry in self.ledger.find(BLOCKED):
            if entry.key == key:
                entry.gone = True
                self.ledger.add(DONE, f"Resolved: {entry.text}", ASSISTANT, 2.0)

    def _did(self, call: Call, text: str) -> None:
        done = self._placed(DONE)
        if call.path:
            known = self.ledger._by_key.get("e" + call.path)
            match = _EDITED.match(known.text) if known and not known.gone else None
            times = int(match[2] or 1) + 1 if match else 1
            self.ledger.add(
                done, f"Edited `{call.path}`" + (f" ({times} times)" if times > 1 else ""), ASSISTANT
            )
        elif call.command and _NOTABLE.search(call.command):
            outcome = _outcome(call.command, text)
            self.ledger.add(done, f"`{call.label}` ok" + (f": {outcome}" if outcome else ""), ASSISTANT, 2.0)

    def _facts(self, text: str) -> None:
        best = sorted(plain_lines(text), key=lambda p: -p[0])[:6]
        for weight, line in best:
            self.ledger.add(AROUND if self.in_turn else FACT, line, TOOL, weight)


def _length(part: Part) -> int:
    if isinstance(part, (Text, Thinking)):
        return len(part.text)
    if isinstance(part, ToolResult):
        return sum(map(len, part.texts))
    if isinstance(part, Shell):
        return len(part.command) + len(part.output)
    return _size(part.arguments) if isinstance(part, ToolCall) else 0


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _fold_turn(ledger: Ledger) -> None:
    """The block of an earlier split turn joins the history that it now belongs to."""
    for entry in ledger.find(ASKED, EARLY, AROUND):
        entry.gone = True
        done = bool(_COMMAND.match(entry.text) or _EDITED.match(entry.text) or _DID.match(entry.text))
        kind = {ASKED: GOAL, EARLY: DONE if done else DECISION, AROUND: FACT}[entry.kind]
        who = LATEST if entry.kind == ASKED else entry.who
        ledger._append(Entry(kind, entry.text, who, entry.weight))


# ------------------------------------------------------------------------------------- tools
_CHECKBOX = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+\[([ xX~])\]\s+(.+)$", re.M)
_STATUS = {
    "completed": DONE, "complete": DONE, "done": DONE, "true": DONE, "finished": DONE, "in_progress": DOING,
    "doing": DOING, "active": DOING, "started": DOING, "cancelled": "", "canceled": "", "deleted": "", "skipped": "",
}  # fmt: skip
_NOTABLE = re.compile(
    r"\b(?:test\w*|pytest|jest|vitest|tox|nox|check|lint|mypy|ruff|eslint|tsc|build|make|cargo|go (?:test|build|vet)|mvn|"
    r"gradle|npm|pnpm|yarn|bun|docker|kubectl|terraform|alembic|migrat\w+|deploy\w*|pip install|apt|brew|"
    r"git (?:commit|push|merge|rebase|tag|revert|reset|checkout -b|switch -c|branch|stash))\b"
)
_EDITS = re.compile(r"edit|write|patch|replace|create|insert|update_file|notebook", re.I)
_PATCHED = re.compile(r"^\*\*\* (?:Update|Add|Delete) File: (.+)$", re.M)
_EXIT = re.compile(r"(?:exit(?:ed)?(?:[ _](?:with|code|status))*|return ?code)[\"'>:=\s]*(-?\d{1,3})\b", re.I)
_ERROR = re.compile(
    r"^.*?(?:\b\w*(?:Error|Exception)\b|\b(?:error|fatal|panic|failed|FAILED|denied|not found|No such file|cannot|unable|refused)\b).*$",
    re.M,
)
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_TALLY = re.compile(r"\b\d+ (?:passed|failed|errors?|tests?|examples?|skipped|warnings?)\b[^\n]{0,80}", re.I)
_COMMITTED = re.compile(r"^\[([^\]\n]{1,80})\] (.{1,120})$", re.M)
_NUMBERED = re.compile(r"\s*\d+(?:→|\t|: ?|\| )")
_PLAIN = re.compile(
    r"(?:[-*•>#/!]{1,3} )?(?:\[\w+\] )?[A-Za-z$~\d\u3040-\u9fff\uac00-\ud7af][^{}<>|;\\]{20,}$"
)


def plan_items(arguments: Mapping[str, object]) -> list[tuple[str, str]]:
    """(status, text) of a todo list or plan among a call's arguments; empty when there is none."""
    for name in ("todos", "plan", "items", "tasks", "steps", "todo_list", "todoList", "task_list"):
        value = arguments.get(name)
        if isinstance(value, str):
            boxes = _CHECKBOX.findall(value)
            return [("completed" if mark in "xX" else "pending", item) for mark, item in boxes]
        items = [x for x in map(_plan_item, value) if x] if isinstance(value, list) else []
        if items:
            return items
    return []


def _plan_item(item: object) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    names = ("content", "step", "title", "text", "task", "subject", "name", "description")
    text = next((v for n in names if isinstance(v := item.get(n), str) and v.strip()), None)
    status = next((item[n] for n in ("status", "state", "completed", "done") if n in item), None)
    return (str(status), text) if text is not None and status is not None else None


def call_of(name: str, arguments: Mapping[str, object]) -> Call:
    """What a call does, whichever client made it."""
    command = next((arguments[n] for n in ("command", "cmd", "script") if arguments.get(n)), "")
    path = next((v for n in _PATHS if isinstance(v := arguments.get(n), str) and v), "")
    text = next((v for n in ("input", "patch") if isinstance(v := arguments.get(n), str)), "")
    if isinstance(command, list):
        command = str(command[-1]) if command else ""
    patched = _PATCHED.search(text or str(command)[:4000])
    if patched or (path and (_EDITS.search(name) or command in ("create", "str_replace", "insert"))):
        target = clean(patched[1] if patched else path).replace("`", "'")
        return Call(f"{name} {target}", path=target)
    if command and not path:
        return _command_call(name, str(command))
    return Call(cut(clean(f"{name} {path}"), 90).replace("`", "'") or "tool")


_PATHS = ("path", "file_path", "filename", "notebook_path", "target_file", "file")


def _command_call(name: str, command: str) -> Call:
    line = re.sub(r"^\s*(?:cd \S+ *(?:&&|;) *)+", "", command[:2000]).strip().split("\n")[0]
    return Call(cut(clean(line), 90).replace("`", "'") or name, command=command[:2000])


def signature(label: str) -> str:
    """What makes two commands the same try: program and first words, without flags and pipes."""
    words = [w for w in re.split(r"[|;&]|2>", label)[0].split() if not w.startswith("-") and "=" not in w]
    return " ".join(words[:3])


def _exit_code(text: str) -> int | None:
    codes = _EXIT.findall(text)
    return int(codes[-1]) if codes else None


def _looks_failed(call: Call, text: str) -> bool:
    code = _exit_code(text[-300:])
    if code is None:
        code = _exit_code(text[:80])
    if code is not None:
        return code != 0
    if text[:40].lstrip().lower().startswith(("error:", "fatal:", "<tool_use_error>", "error ")):
        return True
    return bool(call.command) and "Traceback (most recent call last)" in text[-8000:]


def error_line(text: str) -> str:
    """The line that says what went wrong, word for word, and where if the text tells."""
    tail = text[:4000] + "\n" + text[-12000:] if len(text) > 16000 else text
    found = [m for m in _ERROR.findall(tail) if not _EXIT.search(m)]
    traced = "Traceback" in tail
    lines = [x for x in tail.split("\n") if x.strip() and not _EXIT.search(x)] or [text]
    line = (found[-1] if traced else found[0]) if found else lines[-1]
    places = _PLACE.findall(tail) if traced else []
    return cut(clean(line), 220) + (f" ({':'.join(places[-1])})" if places else "")


def _outcome(command: str, text: str) -> str:
    committed = _COMMITTED.search(text[:2000]) if "git" in command else None
    if committed:
        return f"[{committed[1]}] {committed[2]}"
    tallies = _TALLY.findall(text[-3000:])
    return clean(tallies[-1]) if tallies else ""


WINDOW = 16_000


def plain_lines(text: str) -> list[tuple[float, str]]:
    """(weight, line) of the lines of an output that state something in plain words."""
    if len(text) > 2 * WINDOW:
        text = text[:WINDOW] + "\n" + text[-WINDOW:]
    found = []
    for line in text.split("\n"):
        if 24 <= len(line) <= 400 and (line.count(" ") >= 4 or not line.isascii()):
            numbered = _NUMBERED.match(line)
            line = (line[numbered.end() :] if numbered else line).strip()
            if _PLAIN.match(line):
                weight = judge_tool(line)
                if weight >= 3:
                    found.append((weight, line))
    return found


# ------------------------------------------------------------------------------------- the summarizer
def extract(history: Iterable[Message], prefix: Iterable[Message], previous: str | None, *,
            max_chars: int | None = None) -> str:  # fmt: skip
    """The summary of `history`, of the first half `prefix` of a split turn, and of what `previous` holds.

    Each message is read once. The result has at most `max_chars` characters (default: a fifth of the removed
    text, 2,000 to 12,000), and about half of what it replaces at most; the latest request may exceed that.
    """
    ledger = Ledger.of(previous)
    reader = _Reader(ledger)
    for message in history:
        reader.read(message)
    reader.in_turn = True
    for message in prefix:
        reader.read(message)
    budget = budget_of(reader.chars, len(previous or ""), max_chars)
    return _render_within(ledger, budget)


def budget_of(removed: int, previous: int, max_chars: int | None) -> int:
    wanted = int(RATIO * removed) + previous
    budget = min(max(wanted, MIN_CHARS), MAX_CHARS) if max_chars is None else max_chars
    return min(budget, previous + removed // 2)


def _render_within(ledger: Ledger, budget: int) -> str:
    for entry in ledger.live():
        if entry.who == LATEST or entry.kind == ASKED:
            entry.text = cut_middle(entry.text, max(400, budget // 4))
    size: Callable[[str], int] = len
    text = render(fit(ledger, budget), spare=budget < SPARE)
    room = budget
    while size(text) > budget and room > 0:
        room -= size(text) - budget
        text = render(fit(ledger, room), spare=budget < SPARE)
    return text
