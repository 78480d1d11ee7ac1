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

from haocompact.compaction import COMPACTION_SUMMARY, Message, Part, Shell, Text, Thinking, ToolCall, ToolResult

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
_CODE_VALUE = re.compile(r"[$<{(\[*%]|.*[(\[{]|(?:none|null|true|false|str|string|undefined|required|optional)\b", re.I)


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
    joined = unicodedata.combining(right) or right in "\u200d\ufe0f" or left == "\u200d" or "🏻" <= right <= "🏿"
    return not joined and not (_is_word(left) and _is_word(right))


def _is_word(char: str) -> bool:
    return char < "\u2e80" and (char.isalnum() or char in "_./:@#-%$\\=+~&?")


# ------------------------------------------------------------------------------------- words and values
_TOKEN = re.compile(r"[\w$~@#%./:+\\-]*[\w%]", re.A)
_HAN = re.compile("[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]+")
_HAN_NUMBER = re.compile("[零一二两三四五六七八九十百千万半]+(?:个|次|天|日|秒|分钟|小时|行|页|元|倍|层|周|月|年|条|台|份|种|人|号)|周[一二三四五六日]")
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
_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\betc\.)(?<!\bvs\.)(?<!\bno\.)\s+|(?<=[。！？；])\s*")
_WRAP = re.compile(r"(?<=[\w,)])\n(?=[a-z])")
_BULLET = re.compile(r"\s*(?:[-*•+]|\d{1,2}[.)、]|[（(]\d{1,2}[)）])\s+(?:\[([ xX~])\]\s*)?|\s*#{1,6}\s+|\s*>\s?")
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
    return marks * 12 <= len(line) and not line.startswith(("at ", 'File "', "+++", "---", "@@", "|", "import "))


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
_NEXT_LEAD = _words(r"\b(?:next steps?|remaining|still to do|to ?do|what(?:'s| is) left|plan)\b|下一步|待办|剩余|接下来|計画|次の")


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
TAGS = {LATEST: "Latest request: ", USER: "User: ", SYSTEM: "System: ", TOOL: "Tool: ", ASSISTANT: "Proposed: "}
_LEFT_OUT = re.compile(r"\((\d+) older entries are only in the original\)")
