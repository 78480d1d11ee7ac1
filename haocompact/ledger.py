"""The offline summary: a ledger of entries, filled from the messages, never a summary of a summary.

    previous --parse--> Ledger --Reader, one pass over the messages--> Ledger --fit--> render

An entry is one line under one heading of the seed's format, in the words of whoever said it. What `render`
writes, `parse` reads back exactly, so the next compaction goes on where this one stopped. A previous summary
that `render` did not write is carried as quoted lines under its own heading.

What is kept is decided by `judge_*` (how much a sentence looks like a rule, a goal, an exact fact) and by
`POOLS` (which entries compete for which share of the budget).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
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
from haocompact.redact import mask_secrets

MIN_CHARS, MAX_CHARS, RATIO = 2_000, 12_000, 0.2
TURN_SEPARATOR = "\n\n---\n\n**Turn Context (split turn):**\n\n"
NO_HISTORY = "No prior history."

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
    tag = _TAG.match(text)
    text = text[tag.end() :] if tag else text
    low = text.lower()
    return mask_secrets(text).strip() if any(h in low for h in _SECRET_HINTS) else text


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


# ------------------------------------------------------------------------------------- words and values
def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STOP = _set(
    """the a an and or but if then than that this these those there here it its is are was were be been being
    am do does did done doing have has had having will would shall should can could may might must not no
    nor of in on at to for from by with without into onto over under about as so such too very just also
    only even still yet again more most less least some any all each every both either neither other
    another own same you your yours we our ours us i me my mine he she they them their his her who whom
    which what when where why how let lets please make made get got use used using want wants need needs
    like actually instead now rather change changed switch sure ok okay yes never always dont don doesn isn
    cant won first last new old thing things way going go one ones up down out off per via because since
    while after before until really think know see say said put keep kept set don't can't doesn't isn't
    it's that's i'd i'll i've we're we'll let's there's what's day days"""
)
_NUMBERS = _set(
    """two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty sixty
    hundred thousand million half twice once double triple quarterly weekly daily monthly monday tuesday
    wednesday thursday friday saturday sunday weekend january february april june july august september
    october november december"""
)
_TOKEN = re.compile(r"[\w$€£~@#%./:+?&=-]*[\w%]", re.A)
_CODE_NAME = re.compile(r"\w*_\w|[a-z]+[A-Z]|[A-Z]\w*[A-Z]|\w+\.\w", re.A)
_DIGIT = re.compile(r"[\d@]", re.A)
_STARTS = re.compile(r"(?:^|[.:!?] |^[\w' ]{2,20}, )[\"'(]*([A-Z]\w*)", re.A)  # a capital there is no name
_NUMBER = re.compile(r"[$€£~+-]?\d[\w.,:%+-]*$", re.A)
_HAN = re.compile("[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]+")
_HAN_NUMBER = re.compile(
    "[零一二两三四五六七八九十百千万半]+"
    "(?:个|次|天|日|秒|分钟|小时|行|页|元|倍|层|周|月|年|条|台|份|种|人|号)|周[一二三四五六日]"
)
_HAN_STOP = re.compile("[的了是不要把成为在和请就都也还只别能会将我你他这那个上下用改换]")
_WORD = re.compile(r"[a-z][a-z']+")
_VALUE_WEIGHT = {"num": 0.9, "id": 0.9, "path": 0.6, "code": 0.5, "word": 0.6, "name": 0.4}


def values_of(text: str) -> dict[str, str]:
    """The exact tokens of a sentence, lower case, each with its class: num, path, id, code, word or name."""
    found: dict[str, str] = {}
    for token in _TOKEN.findall(text):
        if token.islower() and token.isalpha() and token not in _NUMBERS:
            continue
        kind = _class_of(token)
        if kind:
            found[token.strip(".:-").lower()] = kind
    if "name" in found.values():
        for token in _STARTS.findall(text):
            if found.get(token.lower()) == "name":
                del found[token.lower()]
    if not text.isascii():
        found.update(dict.fromkeys(_HAN_NUMBER.findall(text), "num"))
    return found


def _class_of(token: str) -> str:
    if token.isalpha():
        if token.lower() in _NUMBERS or token[:-1].lower() in _NUMBERS:
            return "word"
        return ("name" if token[1:].islower() else "code") if len(token) > 1 else ""
    if _NUMBER.match(token):
        return "num"
    if "/" in token.strip("/"):
        return "path"
    if _DIGIT.search(token):
        return "id"
    return "code" if _CODE_NAME.match(token) else "name" if token[:1].isupper() else ""


class Said:
    """A sentence with what its judges need: lower case, words, and (when asked for) values."""

    __slots__ = ("_values", "bullet", "lead", "low", "text", "words")

    def __init__(self, text: str, lead: str = "", bullet: bool = False) -> None:
        self.text = text
        self.lead = lead
        self.bullet = bullet
        self.low = f" {text.lower().replace('’', chr(39))} "
        self.words = frozenset(_WORD.findall(self.low))
        self._values: dict[str, str] | None = None

    @property
    def values(self) -> dict[str, str]:
        if self._values is None:
            self._values = values_of(self.text)
        return self._values

    @property
    def substance(self) -> float:
        return sum(map(_VALUE_WEIGHT.__getitem__, self.values.values()))

    @property
    def stems(self) -> set[str]:
        """The words that say what it is about: no stop words, no endings; Chinese by pairs."""
        exact = {w for v, kind in self.values.items() if kind != "code" for w in _WORD.findall(v)}
        stems = {_stem(w) for w in self.words - _STOP - exact if len(w) > 2} - _STOP
        for run in () if self.text.isascii() else _HAN.findall(self.text):
            stems.update(p for i in range(len(run) - 1) if not _HAN_STOP.search(p := run[i : i + 2]))
        return stems


def _stem(word: str) -> str:
    for ending in ("'s", "ies", "ing", "ed", "es", "s", "ly", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


# ------------------------------------------------------------------------------------- sentences
_END = re.compile(
    r"(?:(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\betc\.)(?<!\bvs\.)(?<!\b[Nn]o\.)|(?<=[.!?][\"')*”’]))\s+"
    r"|(?<=[。！？；])\s*"
)
_ENDS_INSIDE = re.compile(r"[.!?][\"')*”’]? |[。！？；]")
_WRAP = re.compile(r"(?<=[\w,)])\n(?=[a-z])")
_INLINE = re.compile(r"`[^`]*`|\(\)")
_BULLET = re.compile(r"\s*(?:(?:[-*•+]|\d{1,2}[.)、]|[（(]\d{1,2}[)）])\s+(?:\[[ xX~]\]\s*)?|>\s?)")
_FLAT_BULLET = re.compile(r" (?:[-•] |\d\. )(?=\S)")
_LOOSE = re.compile(
    r"at (?:async )?[\w.<>$]+ ?\(|File \"|\+\+\+|---|@@|[|$➜]|(?:import|from) [\w.{}*, ]+ (?:import|from) "
    r"|import [\w.]+$"
)


def sentences(text: str) -> Iterator[Said]:
    """Sentences of prose with the heading or colon line above their list; code and logs are left out."""
    lead, fenced = "", False
    for line in _WRAP.sub(" ", text).split("\n"):
        body = line.strip()
        if body.startswith(("```", "~~~")):
            fenced = not fenced
        if fenced or len(body) < 3 or body.startswith("```"):
            continue
        bullet = _BULLET.match(line)
        body = line[bullet.end() :].strip() if bullet else body
        if body.startswith("#"):
            lead = body
            continue
        is_lead = body.rstrip("* ").endswith((":", "："))
        for part in _END.split(body) if _ENDS_INSIDE.search(body) else (body,):
            if len(part) > 2 and looks_like_prose(part):
                yield Said(part, lead, bool(bullet))
        lead = body if is_lead else lead if bullet else ""


def looks_like_prose(text: str) -> bool:
    """Words with few code marks: `x = f(y);` and `at foo (a.js:1:2)` are none."""
    if "\\n" in text or (text.endswith(",") and len(text) < 50):
        return False
    bare = _INLINE.sub("", text) if "`" in text or "()" in text else text
    marks = sum(map(bare.count, '{}();=<>|\\[]"'))
    if not text.isascii() and _HAN.search(text):
        return marks * 5 <= len(text)
    return marks * 11 <= len(text) and not _LOOSE.match(text) and not text.endswith((";", "{", "}"))


# ------------------------------------------------------------------------------------- what a sentence is
@dataclass(frozen=True, slots=True)
class Cue:
    """Signs of one intent: whole words, phrases (a blank stands for a word's edge), and CJK substrings."""

    words: frozenset[str]
    phrases: tuple[str, ...]
    cjk: tuple[str, ...] = ()

    def __contains__(self, said: object) -> bool:
        if not isinstance(said, Said):
            return False
        if not self.words.isdisjoint(said.words) or any(p in said.low for p in self.phrases):
            return True
        return not said.text.isascii() and any(p in said.text for p in self.cjk)


def _cue(words: str, phrases: str, cjk: str = "") -> Cue:
    return Cue(_set(words), tuple(p.replace("_", " ") for p in phrases.split()), tuple(cjk.split()))


STRONG = _cue(
    """must mustn't never always cannot can't don't dont shall nobody nothing forbidden forbid forbids
    prohibited ban bans banned mandatory strictly only should shouldn't ought required requires require
    requirement prefer prefers preferred preferably avoid refrain deadline budget ensure remember unless
    convention policy negotiable exception exceptions allowed permitted limit compulsory obligatory""",
    """_do_not_ _may_not_ _no_one_ _at_most_ _at_least_ _no_more_ _no_less_ _no_later_ _no_longer_than_
    _under_no_ _off_limits _off-limits _hands_off _has_to_ _have_to_ _from_now_on _going_forward
    _make_sure _instead_of_ _rather_than_ _house_rule _are_to_be_ _is_to_be_ _can_not_ _in_no_case
    _no_way _needs_to_be _need_to_be _well_alone _alone.""",
    """必须 不要 不能 不得 不可 禁止 只能 只用 只准 只许 务必 一定要 总是 永远 千万 绝不 绝对 尽量 优先 最好
    不超过 至少 最多 以内 截止 预算 应该 应当 统一 一律 不许 不准 避免 记住 每次都 别动 别用 别改 别碰
    上限 必ず 絶対 しないで のみ ないこと べき 優先 常に てください 반드시 절대 하지마 마세요 항상 금지
    해야 이내 우선""",
)
WEAK = _cue(
    """keep stick use using uses every everything everyone all each any none no without whenever until
    before after within maximum minimum max min limited limits cap capped under over name named call
    called leave treat want wants like likes hate hates love need needs english german french chinese
    japanese korean spanish goes stays lives belongs expect expects supposed favour favor style rather
    target support please tops due ship ships taste habit usually skip anything anyone anywhere ignore
    fan beats freeze frozen starts start reserved nowhere everywhere""",
    """_up_to_ _less_than_ _fewer_than_ _end_of_ _more_than_ _i'd_ _by_the_ _in_time _per_ _at_the_latest
    _so_long_as_""",
    """请用 使用 喜欢 偏好 想要 需要 所有 每个 每次 都要 保持 放在 之前 之后 以下 以上 不用 习惯 希望 支持
    只 别 都 までに ください 까지 꼭""",
)
AIM = _cue(
    "goal goals aim aims aiming objective purpose mission eventually ultimately deliverable hope hoping",
    """_trying_to_ _i_want_ _we_want_ _we_need_ _i_need_ _i'd_like_ _the_point_ _so_that_ _end_up_with_
    _the_idea_ _the_task _your_task _your_job _in_the_end _after_is_ _we're_after _i'm_after _we_plan_
    _intend_to_ _to_be_able_to_ _what_matters _the_plan_is""",
    "目标 目的 想要 希望 任务 最终 打算 計画 目標 목표",
)
DECIDES = _cue(
    """decide decided decision decisions chose choose chosen choice settled opted opt picked pick rejected
    adopt adopted because therefore agreed concluded discarded""",
    """_went_with _go_with _going_with _ruled_out _trade-off _instead_of_ _rather_than_ _turned_out
    _turns_out _root_cause _the_reason _which_is_why _due_to_ _plan_to_""",
    "决定 选择 选用 采用 因为 之所以 改用 原因 结论 选定 放弃 決定 採用 ため 결정 선택 때문",
)
STATES = _cue(
    """is are was were has had uses used runs ran listens expires returns stores stored takes took costs
    lives sits needs requires accepts allows rejects supports contains holds belongs owns owned handles
    measured found points defaults called named comes came falls drops fails failed means starts ends
    became equals sends caps capped limited reached peaked averages lasts lags remains seen reported
    keeps reads writes scans depends expects throws talks offers ships serves breaks slips hits sends
    allocates exceeds""",
    "_will_be_ _set_to_ _can_be_",
    "是 为 在 有 用 需 耗时 位于 达到 超过 低于 です ます 입니다",
)
CORRECTS = _cue(
    """actually instead correction change changed changing changes switch switched replace replaced rename
    renamed sorry oops mixed revise revised superseded supersedes bump bumped raise raised lower lowered
    increase increased reduce reduced extend extended update updated wrong mistake override overridden
    outdated stale now moved move meant misspoke rather migrated swap swapped postponed""",
    """_no_longer_ ,_not_ _scratch_that _on_second_th _make_it_ _make_that_ _pushed_ _after_all _turns_out
    _not_right _changed_my_mind _these_days _from_now_on _than_i_said _forget_ _i_said_ _hmm_ ._no,_
    _on_reflection _from_today _in_place_of_ _second_thought""",
    """改成 改为 换成 改用 其实 更正 不再 不用了 取消 调整 应为 而不是 说错 搞错 推迟 提前到 変更 訂正
    代わりに 실은 변경 대신""",
)
SURELY = _cue(
    "actually instead correction sorry oops misspoke mistake wrong rather",
    """_no_longer_ ,_not_ _scratch_that _on_second_th _changed_my_mind _these_days _from_now_on _than_i_said
    _i_said_ _hmm_ ._no,_ _on_reflection _from_today _in_place_of_""",
    "改成 改为 换成 改用 其实 更正 不再 不用了 而不是 说错 搞错 変更 訂正 변경",
)
TELLS = _cue(
    """note warning important limit limited limits expire expires deadline only requires required default
    defaults must max maximum min minimum deprecated removed port version quota owner scheduled downtime
    until since budget retention timeout endpoint threshold reserved locked unsupported disabled enabled
    frozen maintenance contact lags behind region plan""",
    "_will_be_ _at_most_ _up_to_",
    "注意 警告 限制 到期 默认 必须 版本 端口 上限",
)
PLANS = _cue(
    "remaining todo",
    "next_step still_to_do to_do left_to_do action_items plan: what's_left",
    "下一步 待办 剩余 接下来 次の",
)
_NARRATES = re.compile(
    r"(?:now,? )?(?:let me|let['’]s|i['’]ll|i will|i['’]m (?:going|now)|i need to|i should|i can see|i see"
    r"|next,|first,|perfect|great|good|excellent|done|ok(?:ay)?\b|sure|looking|checking|here['’]s"
    r"|here (?:is|are)"
    r"|the user|you['’]re|wait|hmm|thank|sorry|now\b|would you|do you|shall i|what would|you can"
    r"|让我|我来|现在|好的|接下来|首先|我会|我将)",
    re.I,
)
_DID = re.compile(
    r"(?:i['’]ve |i (?:have |just )?|all |we )?(?:updated?|added|fixed|removed?|created|changed|moved|renamed"
    r"|implemented|refactored|wrote|rewrote|committed|pushed|deleted|replaced|extracted|installed|cleaned"
    r"|verified|completed|已|完成|修复了|添加了|新增)\b",
    re.I,
)
_ASKS = re.compile(
    r"(?:can|could|would|will|what(?! (?:we|i))|why|how|where|when (?:do|does|did|will|can|is)|who|which|is"
    r"|are|do you|does|did|should)\b|(?:怎么|为什么|什么|能不能)",
    re.I,
)
_ORDERS = re.compile(
    r"(?:(?:please|now|then|and|also|ok,?|alright,?|btw,?) )*(?:fix|add|create|read|look|check|show|update"
    r"|implement|refactor|continue|write|run|find|give|tell|explain|remove|delete|make|start|try|do|commit|push"
    r"|open|move|copy|build|test|review)\b",
    re.I,
)
_OWN = (" i'm ", " i am ", " my ", " our ", " we ", " for me ", " to me ", " the ", " you'll ")


def judge_user(said: Said) -> tuple[str, float]:
    """(kind, weight) of one sentence of the user. Rules weigh most, a bare question least."""
    text = said.text
    rule = 3.0 * (said in STRONG or said.low.startswith(" no ")) + 1.0 * (said in WEAK)
    if not rule and said.lead and Said(said.lead) in STRONG:
        rule = 3.0
    aims = said in AIM
    fit = min(said.substance, 2.4) - len(text) / 160 - 4 * (_width(text) < 12 and not said.values)
    fit -= 2 * (text.endswith((":", "：")) or text.isupper())
    if text.endswith(("?", "？")) or (rule < 3 and _ASKS.match(text)):
        return GOAL, 1 + fit / 2 + aims
    if aims and rule < 3:
        return GOAL, 7 + fit
    if rule and not (rule < 3 and _ORDERS.match(text)):
        return RULE, 5 + rule + fit
    if _ORDERS.match(text) or not (said.values or said.low.startswith(_OWN)):
        return GOAL, 3.5 + fit
    return (FACT, 5.5 + fit) if said in STATES else (GOAL, 4.5 + fit)


def judge_assistant(said: Said) -> tuple[str, float]:
    """(kind, weight) of one sentence of the assistant; narration weighs least."""
    text, decides = said.text, said in DECIDES
    if not decides and _NARRATES.match(text):
        return FACT, -4.0
    states = said in STATES
    plain = not said.bullet and text.endswith((".", "。", "!")) and "**" not in text
    quoted = sum(f"`{v}" in said.low or f"{v}`" in said.low for v in said.values)
    weight = min(said.substance - 0.3 * quoted, 3.2) + 0.4 * states + 1.2 * plain
    weight -= (
        0.8 * said.bullet + 0.3 * min(3, text.count("`") // 2) + 1.2 * (not (plain or states or decides))
    )
    weight -= len(text) / 120 + 2 * (_width(text) < 30) + 3 * text.endswith((":", "：", "?", "？"))
    if _NARRATES.match(text) and not said.values:
        return FACT, weight - 4
    if decides:
        return DECISION, weight + 1
    return (DONE, weight - 1) if _DID.match(text) else (FACT, weight)


def judge_tool(line: str) -> float:
    """Weight of one line of a tool's output as a fact in plain words."""
    said = Said(line)
    prose = not said.words.isdisjoint(_JOINS) or not (line.isascii() or not _HAN.search(line))
    weight = min(said.substance, 2.4) + 0.9 * prose + 0.6 * (said in STATES) + 0.6 * (said in TELLS)
    weight += 0.5 * line.endswith((".", "。")) + 0.3 * line[:1].isupper()
    marks = sum(map(line.count, '{}()=<>|\\[]"`*_#'))
    return weight - min(3.0, 0.4 * marks) - len(line) / 160 - _LOW_LINE.get(line[:2], 0.0)


_JOINS = _set(
    "the of to in on at by with than for and until before after from over per is are was not will has a an be"
)
_LOW_LINE = {"//": 1.2, "* ": 1.2, "# ": 1.0, "- ": 0.5, "> ": 0.5, "/*": 1.2, "dr": 0.5, "-r": 2.0}


def _width(text: str) -> int:
    """Length in columns of type, roughly: a Han character says as much as a word."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


# ------------------------------------------------------------------------------------- entries
@dataclass(slots=True)
class Entry:
    """One line of the ledger. Two entries are equal when they render equally."""

    kind: str
    text: str
    who: str
    weight: float = field(default=1.0, compare=False)
    key: str = field(default="", compare=False)
    seq: int = field(default=0, compare=False)
    message: int = field(default=0, compare=False)
    gone: bool = field(default=False, compare=False)
    values: dict[str, str] = field(default_factory=dict, compare=False)
    stems: set[str] = field(default_factory=set, compare=False)
    spoken: set[str] = field(default_factory=set, compare=False)


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
    Section("## Original Request", ASKED, USER),
    Section("## Early Progress", EARLY, ASSISTANT),
    Section("## Context for Suffix", AROUND, ASSISTANT),
)
_BY_HEADING = {s.heading: s for s in (*SECTIONS, *TURN_SECTIONS)}
_BY_KIND = {s.kind: s for s in (*SECTIONS, *TURN_SECTIONS)}
_TURN_KINDS = (ASKED, EARLY, AROUND)
_ABOUT = frozenset((GOAL, RULE, FACT, DECISION, EARLIER, EARLY, AROUND))
TAGS = {
    LATEST: "Latest request: ",
    USER: "User: ",
    SYSTEM: "System: ",
    TOOL: "Tool: ",
    ASSISTANT: "Proposed: ",
}
_LEFT_OUT = re.compile(r"\((\d{1,12}) older entries are only in the original\)")
_COMMAND = re.compile(r"`([^`]+)` (?:failed|ok)\b")
_EDITED = re.compile(r"Edited `([^`]+)`(?: \((\d{1,9}) times\))?$")


def line_of(entry: Entry) -> str:
    """The entry as it stands under its heading (`render` numbers a numbered list)."""
    section = _BY_KIND[entry.kind]
    tag = "" if entry.who == section.who else TAGS[entry.who]
    return f"{section.bullet}{tag}{entry.text}"


def shape_of(line: str) -> str:
    """A line without what changes from one output to the next."""
    return _VARYING.sub("0", line)


_VARYING = re.compile(r"'[^']{0,80}'|\b[0-9a-f]{7,40}\b|\d[0-9a-f.:-]*")


def key_of(kind: str, text: str, who: str) -> str:
    """What makes two entries the same: command, file or words; of an output, all but its figures."""
    if who == TOOL and kind in (FACT, AROUND):
        return "`" + shape_of(text)
    if kind in (DONE, BLOCKED, EARLY):
        command, edited = _COMMAND.match(text), _EDITED.match(text)
        if command:
            return f"`{kind == BLOCKED}{signature(command[1])}"
        if edited:
            return f"`{edited[1]}"
        if text.startswith("Resolved: "):
            return "`resolved"
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text


class Ledger:
    """Entries in order of time. `left_out` counts those that found no room, here and in earlier rounds."""

    CAP = 300  # of one kind by one speaker, while reading; a summary has room for about a hundred in all
    CAPS: Mapping[str, int] = {USER: CAP, ASSISTANT: 150, TOOL: 100}

    def __init__(self, entries: Iterable[Entry] = (), left_out: int = 0) -> None:
        self.left_out = left_out
        self.seen: Counter[str] = Counter()
        self._kinds: dict[str, list[Entry]] = {}
        self._by_key: dict[str, Entry] = {}
        self._by_stem: dict[str, deque[Entry]] = {}
        self._floor: dict[tuple[str, str], float] = {}
        self._size: Counter[tuple[str, str]] = Counter()
        self.message = 0
        self._seq = 0
        for entry in entries:
            self.put(entry, news=False)

    @classmethod
    def of(cls, previous: str | None) -> Ledger:
        """The ledger that a previous summary holds, whoever wrote it."""
        text = (previous or "").replace("\r\n", "\n").strip()
        ledger = parse(text) if text else cls()
        return cls(_quoted(text)) if ledger is None else ledger

    @property
    def entries(self) -> list[Entry]:
        return sorted((e for kind in self._kinds for e in self.find(kind)), key=lambda e: e.seq)

    def find(self, *kinds: str) -> list[Entry]:
        return [e for kind in kinds for e in self._kinds.get(kind, ()) if not e.gone]

    def latest(self) -> Entry | None:
        return next((e for e in reversed(self._kinds.get(GOAL, [])) if e.who == LATEST and not e.gone), None)

    def at(self, key: str) -> Entry | None:
        entry = self._by_key.get(key)
        return None if entry is None or entry.gone else entry

    def clear(self, *kinds: str, who: str | None = None) -> None:
        for kind in kinds:
            for entry in self.find(kind):
                entry.gone = who is None or entry.who == who
            self._kinds[kind] = self.find(kind)

    def add(self, kind: str, text: str, who: str, weight: float = 1.0, *, limit: int = 320) -> None:
        """Add an entry unless it stands there already; what it corrects or repeats gives way."""
        if weight < self._floor.get((kind, who), -9.0):
            self.left_out += 1
            return
        line = cut(clean(text), limit)
        if not line or line == "(none)":
            return
        key = key_of(kind, line, who)
        known = self.at(key)
        if known is None or _gives_way(known, kind, who):
            self.put(Entry(kind, line, who, weight, key))
        else:
            known.weight = max(known.weight, weight)

    def put(self, entry: Entry, *, news: bool = True) -> None:
        """Add as it is; `news` may correct what stands there."""
        self._seq += 1
        entry.seq = self._seq
        entry.message = self.message
        entry.key = entry.key or key_of(entry.kind, entry.text, entry.who)
        self._kinds.setdefault(entry.kind, []).append(entry)
        if entry.who == LATEST or entry.kind == ASKED:
            return
        self._by_key[entry.key] = entry
        if entry.kind in _ABOUT:
            self._index(entry, news)
        self._size[entry.kind, entry.who] += 1
        if self._size[entry.kind, entry.who] > 2 * self.CAPS.get(entry.who, self.CAP):
            self._prune(entry.kind, entry.who)

    def _index(self, entry: Entry, news: bool) -> None:
        said = Said(entry.text)
        entry.values, entry.stems = said.values, said.stems - _CUE_STEMS
        entry.spoken = {_stem(v) for v in entry.values}
        self.seen.update(entry.values.keys())
        if news and entry.who in (USER, ASSISTANT):
            self._supersede(entry, said in SURELY or (said in CORRECTS and not _FORBIDS.search(entry.text)))
        for stem in entry.stems:
            self._by_stem.setdefault(stem, deque(maxlen=32)).append(entry)

    def _supersede(self, entry: Entry, corrects: bool) -> None:
        if not (corrects or entry.values):
            return
        near = {old.seq: old for stem in entry.stems for old in self._by_stem.get(stem, ())}
        for old in near.values():
            mine = entry.who == USER or old.who in (ASSISTANT, TOOL)
            if mine and not old.gone and (old.message != entry.message or entry.message == 0):
                old.gone = _replaces(entry, old, corrects)

    def _prune(self, kind: str, who: str) -> None:
        """Keep the best half of one kind, so that memory stays the same however long the input is."""
        live = [e for e in self.find(kind) if e.who == who]
        scores = {e.seq: e.weight + 2 * i / len(live) + 9 * (kind in _AGING) * i for i, e in enumerate(live)}
        for entry in sorted(live, key=lambda e: (-scores[e.seq], -e.seq))[self.CAPS.get(who, self.CAP) :]:
            entry.gone = True
            self.left_out += 1
        kept = [e for e in live if not e.gone]
        self._kinds[kind] = self.find(kind)
        self._size[kind, who] = len(kept)
        if kind not in _AGING and kept:
            self._floor[kind, who] = min(scores[e.seq] for e in kept) - 2
        self._forget()

    def _forget(self) -> None:
        self._by_key = {k: e for k, e in self._by_key.items() if not e.gone}
        if len(self._by_stem) > 20_000:
            kept = ((s, [e for e in d if not e.gone]) for s, d in self._by_stem.items())
            self._by_stem = {s: deque(d, maxlen=32) for s, d in kept if d}
        if len(self.seen) > 50_000:
            self.seen = Counter({v: n for v, n in self.seen.items() if n > 1})


_AGING = frozenset((DONE, BLOCKED))
_CUE_STEMS = frozenset(map(_stem, CORRECTS.words | {"longer", "mind", "reflection", "plan", "way", "forget"}))


def _gives_way(known: Entry, kind: str, who: str) -> bool:
    """A state gives way to the newer one, a plan to its progress, a fact to the user's own word for it."""
    plan = known.kind in (DOING, NEXT) and known.kind != kind
    known.gone = known.key.startswith("`") or plan or (who == USER != known.who and kind != NEXT)
    return known.gone


def _replaces(new: Entry, old: Entry, corrects: bool) -> bool:
    """Does `new` give another value for what `old` is about?

    It must be about the same: all words of the one in the other, or most of both. And the values must be of
    one class; without values, a word of correction and one word that differs will do. Without such a word,
    only one value may differ, and what forbids adds up: "never touch a", "never touch b".
    """
    said = old.stems - new.spoken
    shared = len(new.stems & said)
    if shared < 2 - corrects:
        return False
    own, others = len(new.stems) - shared, len(said) - shared
    fresh = {c for v, c in new.values.items() if v not in old.values}
    named = any(v in old.values or (c == "name" and v in old.text.lower()) for v, c in new.values.items())
    alike = _same_class(fresh, {c for v, c in old.values.items() if named or v not in new.values})
    if not corrects:
        same = alike and not (own and others) and 2 * shared >= 3 * max(own, others)
        return same and _restates(new, old, fresh)
    if not (new.values or old.values):
        return shared >= 2 and max(own, others) <= shared // 2 + 1 - (shared == 2)
    contained = shared >= 1 and not (own and others) and own <= 2 * shared + 1
    mostly = shared >= 3 - named and 2 * others <= shared + named and own <= 2 * shared
    return (alike and (contained or mostly)) or (named and contained and not others)


def _restates(new: Entry, old: Entry, fresh: set[str]) -> bool:
    single = sum(v not in old.values and c != "name" for v, c in new.values.items()) <= 1
    forbids = _FORBIDS.search(old.text) or _FORBIDS.search(new.text)
    return (single or fresh == {"word", "num"}) and not forbids


_FORBIDS = re.compile(
    r"\b(?:never|not?|nobody|nothing|cannot|avoid|without|forbid\w*)\b|n['’]t\b|[不别禁勿]", re.I
)


def _same_class(some: set[str], others: set[str]) -> bool:
    exact = {"id", "path", "code", "name"}
    return bool(some & others or (some & exact and others & exact))


def _quoted(text: str) -> list[Entry]:
    lines = (clean(line) for line in text.split("\n"))
    return [weighed(Entry(EARLIER, line, SYSTEM)) for line in lines if line and line != "(none)"]


# ------------------------------------------------------------------------------------- text <-> ledger
def render(ledger: Ledger, *, spare: bool = False) -> str:
    """The seed's section format. `spare` leaves out the sections that would only say "(none)"."""
    turn = ledger.find(*_TURN_KINDS)
    bare = bool(turn) and len(turn) == len(ledger.entries) and not ledger.left_out
    body = "" if bare else _render_sections(SECTIONS, ledger, spare)
    if ledger.left_out:
        body += f"\n\n({ledger.left_out} older entries are only in the original)"
    if not turn:
        return body.strip() or "## Goal\n- (none)"
    return (body.strip() or NO_HISTORY) + TURN_SEPARATOR + _render_sections(TURN_SECTIONS, ledger, spare)


def _render_sections(sections: tuple[Section, ...], ledger: Ledger, spare: bool) -> str:
    blocks: list[str] = []
    progress = False
    for section in sections:
        lines = [line_of(e) for e in ledger.find(section.kind)]
        if section.kind == NEXT:
            lines = [f"{n}. {line[3:]}" for n, line in enumerate(lines, 1)]
        if not lines and section.none and not spare:
            lines = ["- (none)"]
        head = section.heading
        if lines and head.startswith("### ") and not progress:
            head, progress = f"## Progress\n{head}", True
        if lines:
            blocks.append("\n".join((head, *lines)))
    return "\n\n".join(blocks)


def parse(text: str) -> Ledger | None:
    """The ledger that `render` made this text from; None when it can't have made it."""
    entries: list[Entry] = []
    section: Section | None = None
    left_out = 0
    for line in text.split("\n"):
        section = _BY_HEADING.get(line, section)
        counted = _LEFT_OUT.fullmatch(line)
        left_out = int(counted[1]) if counted else left_out
        entry = _parse_line(line, section) if section else None
        if entry is not None and clean(entry.text) == entry.text:
            entries.append(weighed(entry))
    ledger = Ledger(entries, left_out)
    return ledger if text in (render(ledger), render(ledger, spare=True)) else None


def _parse_line(line: str, section: Section) -> Entry | None:
    if section.kind == NEXT:
        line = re.sub(r"^\d{1,9}\. ", section.bullet, line, count=1)
    text = line.removeprefix(section.bullet)
    if text == line or not text or text == "(none)":
        return None
    for who, tag in TAGS.items():
        if text.startswith(tag) and who != section.who:
            return Entry(section.kind, text[len(tag) :], who)
    return Entry(section.kind, text, section.who)


def weighed(entry: Entry) -> Entry:
    """Weigh an entry read back by its words alone; that it was kept before counts a little."""
    said = Said(entry.text)
    if entry.kind in (DOING, NEXT):
        entry.weight = PLANNED
    elif entry.kind == EARLIER:
        entry.weight = max(judge_user(said)[1], judge_assistant(said)[1])
    elif entry.who in (USER, SYSTEM):
        entry.weight = max(judge_user(said)[1], {RULE: 6.0, FACT: 5.5}.get(entry.kind, 2.0)) + 1
        entry.weight += entry.kind == RULE
        entry.weight -= 3 * (entry.who == SYSTEM)
    elif entry.who == TOOL and entry.kind in (FACT, AROUND):
        entry.weight = judge_tool(entry.text) + 0.7
    else:
        entry.weight = max(judge_assistant(said)[1], 1.0) + 0.7
    return entry


# ------------------------------------------------------------------------------------- the budget
@dataclass(frozen=True, slots=True)
class Pool:
    """Entries that compete with each other; `share` of the budget is theirs before others may fill up."""

    share: float
    kinds: tuple[str, ...]
    who: tuple[str, ...]
    recency: float = 1.0


_ANYONE = (USER, ASSISTANT, SYSTEM, TOOL)
RULES = Pool(0.30, (RULE,), (USER,), 0)
WORK = Pool(0.06, (DONE,), _ANYONE, 9)
POOLS = (
    RULES,
    Pool(0.50, (EARLIER,), (SYSTEM,), 0),
    Pool(0.06, (DOING,), _ANYONE, 0),
    Pool(0.10, (NEXT,), _ANYONE, 0),
    Pool(0.05, (BLOCKED,), _ANYONE, 9),
    Pool(0.14, (FACT, DECISION), (USER,)),
    Pool(0.10, (GOAL,), (USER,), 2),
    Pool(0.20, (DECISION, FACT), (ASSISTANT,)),
    Pool(0.10, (FACT,), (TOOL,)),
    Pool(0.03, (RULE,), (SYSTEM,)),
    Pool(0.10, (EARLY,), _ANYONE),
    Pool(0.10, (AROUND,), _ANYONE),
)
PLANNED = 6.0  # the weight of a plan's steps
WORTH = 2.5  # entries of less are not used to fill up what room is left
SPARE = 700  # below this budget there is no room for "(none)"
_Ranked = tuple[float, int, Entry]


def fit(ledger: Ledger, budget: int) -> Ledger:
    """What of the ledger goes into `budget` characters. The latest request always does."""
    entries = _visible(ledger)
    fixed = [e for e in entries if e.who == LATEST or e.kind == ASKED]
    room = budget - _overhead(entries, budget) - sum(map(_cost, fixed))
    chosen = {e.seq for e in fixed}
    scored = [_ranked(pool, entries, ledger.seen) for pool in POOLS]
    for pool, ranked in zip(POOLS, scored, strict=True):
        room -= _take((x for x in ranked if x[0] >= WORTH), min(room, int(pool.share * budget)), chosen)
    for ranked in scored[:2]:
        room -= _take(ranked, room, chosen)
    room -= _take(_ranked(WORK, entries, ledger.seen), min(room, int(WORK.share * budget)), chosen)
    worth = (x for ranked in scored for x in ranked if x[0] >= WORTH)
    _take(sorted(worth, key=lambda x: (-x[0], -x[1])), room, chosen)
    kept = [e for e in entries if e.seq in chosen]
    return Ledger(kept, ledger.left_out + len(entries) - len(kept))


def _visible(ledger: Ledger) -> list[Entry]:
    """Entries without the requests that the latest one holds word for word."""
    latest = " ".join(e.text for e in ledger.entries if e.who == LATEST or e.kind == ASKED)
    return [e for e in ledger.entries if not (e.kind == GOAL and e.who == USER and e.text in latest)]


def _overhead(entries: list[Entry], budget: int) -> int:
    kinds = {e.kind for e in entries}
    heads = sum(len(s.heading) + 11 * s.none + 2 for s in _BY_KIND.values() if s.kind in kinds or s.none)
    turn = len(TURN_SEPARATOR) + len(NO_HISTORY) if kinds.intersection(_TURN_KINDS) else 0
    return min(heads + turn + len("## Progress\n") + 60, budget // 3)


def _cost(entry: Entry) -> int:
    return len(line_of(entry)) + 2


def _ranked(pool: Pool, entries: list[Entry], seen: Mapping[str, int]) -> list[_Ranked]:
    """(score, age, entry), best first: weight, how recent, how rare its values are."""
    mine = [e for e in entries if e.kind in pool.kinds and e.who in pool.who]
    last = max(len(mine) - 1, 1)
    scored = []
    for index, entry in enumerate(mine):
        score = entry.weight + pool.recency * index / last + _rarity(entry, seen)
        scored.append((score + 4 * (entry.kind == GOAL and index == 0), entry.seq, entry))
    return sorted(scored, key=lambda x: (-x[0], -x[1]))


def _rarity(entry: Entry, seen: Mapping[str, int]) -> float:
    counts = [seen.get(v, 1) for v in entry.values]
    return max(-1.0, min(1.2, 0.4 * sum(c <= 1 for c in counts) - 0.3 * sum(c > 4 for c in counts)))


def _take(ranked: Iterable[_Ranked], room: int, chosen: set[int]) -> int:
    used = 0
    for _, seq, entry in ranked:
        cost = _cost(entry)
        if seq not in chosen and used + cost <= room:
            chosen.add(seq)
            used += cost
    return used


# ------------------------------------------------------------------------------------- reading messages
_OPENING = re.compile(r"<([A-Za-z][\w-]{0,60})\b[^<>]{0,400}>")
_INJECTED = _set(
    "instructions environment output stdout stderr returncode context documents attachment observation"
)
_NOT_A_REQUEST = ("Caveat: The messages below", "[Request interrupted")
_STANDING = ("# AGENTS.md instructions", "# CLAUDE.md", "Contents of ")
_SUMMARIES = ("This session is being continued from a previous", "Another language model started to solve")
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
    kept: list[str] = []
    position, unclosed = 0, set[str]()
    for match in _OPENING.finditer(text):
        tag = match[1]
        injected = "-" in tag or "_" in tag or tag.lower() in _INJECTED
        if match.start() < position or tag in unclosed or not injected:
            continue
        end = text.find(f"</{tag}>", match.end()) if len(unclosed) < 50 else -1
        if end < 0:
            unclosed.add(tag)
            continue
        kept.append(text[position : match.start()])
        position = end + len(tag) + 3
    return "".join((*kept, text[position:]))


def own_words(text: str) -> tuple[str, str]:
    """(what a user wrote, what they pasted): of a long paste, its first and last lines are theirs."""
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) <= 12 or 2 * sum(map(looks_like_prose, lines)) >= len(lines):
        return text, ""
    return "\n".join((*lines[:3], *lines[-3:])), "\n".join(lines[3:-3])


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool was asked to do: `label` names it; `path` when it edits that file."""

    label: str = "tool"
    command: str = ""
    path: str = ""


class Reader:
    """Fills a ledger from messages, one at a time; holds nothing of a message but its entries."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.in_turn = False
        self.chars = 0
        self.carried = 0
        self._planned = False
        self._heard: Entry | None = None
        self._calls: dict[str | None, Call] = {}
        self._tasks: dict[str, tuple[str, str]] = {}
        self._outputs: dict[int, None] = {}
        self._shapes: Counter[int] = Counter()

    def read(self, message: Message) -> None:
        if message.hidden:
            return
        if not self.ledger.message:
            _fold_turn(self.ledger)
        self.ledger.message += 1
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
                self._result(_command_call("bash", part.command), part.output, bool(_exit_code(part.status)))

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
        self.carried += len(text)
        self.chars -= len(text)
        other = Ledger.of(re.split(r"\n\n(?=<read-files>\n|<modified-files>\n|<<ccr:)", text.strip())[0])
        _fold_turn(other)
        self.ledger.left_out += other.left_out
        for entry in other.entries:
            if entry.who == LATEST:
                self._demote()
            if entry.who == LATEST or self.ledger.at(entry.key) is None:
                self.ledger.put(entry, news=False)

    def _user(self, text: str) -> None:
        if not text or text.startswith(_NOT_A_REQUEST):
            return
        if text.startswith((*_OBSERVED, *_STANDING, *_SUMMARIES)):
            self._by_others(text)
            return
        self._demote()
        own, pasted = own_words(text)
        self._facts(pasted)
        self._sentences(own)
        latest = cut_middle(clean(text), 2 * MAX_CHARS)
        if latest and latest != "(none)":
            if self.in_turn:
                self.ledger.clear(ASKED)
            self._heard = Entry(ASKED, latest, USER) if self.in_turn else Entry(GOAL, latest, LATEST)
            self.ledger.put(self._heard)

    def _by_others(self, text: str) -> None:
        """What a client sends in the user's name: outputs, standing instructions, its own summaries."""
        if text.startswith(_OBSERVED):
            self._result(Call(), text, False)
        elif text.startswith(_STANDING):
            self._system(text)
        else:
            self._absorb(text)

    def _demote(self) -> None:
        """The request that was the latest becomes one of the requests."""
        entry = self.ledger.latest()
        if entry is None:
            return
        entry.gone = True
        if entry is not self._heard:
            known = [e.text for e in self.ledger.find(GOAL, RULE, FACT)]
            lines = [said.text for said in sentences(_FLAT_BULLET.sub("\n- ", entry.text))]
            news = [x for x in lines if not any(x in k or (k in x and len(k) > 20) for k in known)]
            self._sentences("\n".join(news))

    def _sentences(self, text: str) -> None:
        """The sentences of a request; those of a long text weigh less, the more it has that weigh as much."""
        judged = [(*judge_user(said), said.text) for said in sentences(text)]
        weights = sorted((w for _, w, _ in judged), reverse=True)
        for kind, weight, line in judged:
            if weight >= 0.3:
                above = weights.index(weight)
                self.ledger.add(kind, line, USER, weight - min(6.0, max(0, above - 6) * 0.3))

    def _system(self, text: str) -> None:
        for said in sentences(text):
            kind, weight = judge_user(said)
            if kind == RULE:
                self.ledger.add(RULE, said.text, SYSTEM, weight - 3)

    def _assistant(self, text: str) -> None:
        self._checklist(text)
        proposed = False
        for said in sentences(text):
            if said.bullet and said.lead and Said(said.lead) in PLANS:
                if not proposed:
                    self.ledger.clear(NEXT, who=ASSISTANT)
                proposed = True
                self.ledger.add(NEXT, said.text, ASSISTANT, limit=200)
                continue
            kind, weight = judge_assistant(said)
            if weight >= 1.5:
                self.ledger.add(self._placed(kind), said.text, ASSISTANT, weight)

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
        self.ledger.clear(DOING, NEXT)
        for status, text in items:
            kind = _STATUS.get(status.lower().replace("-", "_"), NEXT)
            if kind:
                self.ledger.add(kind, text, USER if kind == NEXT else ASSISTANT, PLANNED, limit=200)

    def _task(self, arguments: Mapping[str, object]) -> None:
        """Single tasks: created by subject, later updated by number."""
        number = str(arguments.get("taskId") or len(self._tasks) + 1)
        status, subject = self._tasks.get(number, ("pending", ""))
        subject = str(arguments.get("subject") or subject)
        if len(self._tasks) < 500:
            self._tasks[number] = str(arguments.get("status") or status), subject
        self._plan([(s, t) for s, t in self._tasks.values() if t])

    # -- what was done
    def _call(self, part: ToolCall) -> None:
        arguments = part.arguments if isinstance(part.arguments, dict) else {"input": part.arguments}
        name = re.split(r"__|\.", part.name)[-1]
        items = plan_items(arguments)
        if name in ("TaskCreate", "TaskUpdate"):
            self._planned = True
            self._task(arguments)
        elif items:
            self._planned = True
            self._plan(items)
        if len(self._calls) > 1000:
            self._calls.clear()
        self._calls[part.id] = call_of(name, arguments)

    def _result(self, call: Call, text: str, is_error: bool) -> None:
        if is_error or _looks_failed(call, text):
            self.ledger.add(BLOCKED, f"`{call.label}` failed: {error_line(text)}", TOOL, 2.0, limit=500)
        else:
            self._resolve(f"`True{signature(call.label)}")
            self._did(call, text)
        self._facts(text, besides=call.path)

    def _resolve(self, key: str) -> None:
        blocked = self.ledger.at(key)
        if blocked is not None:
            blocked.gone = True
            self.ledger.add(DONE, f"Resolved: {blocked.text}", ASSISTANT, 2.0, limit=520)

    def _did(self, call: Call, text: str) -> None:
        done = self._placed(DONE)
        if call.path:
            known = self.ledger.at(f"`{call.path}")
            match = _EDITED.match(known.text) if known else None
            times = int(match[2] or 1) + 1 if match else 1
            self.ledger.add(
                done, f"Edited `{call.path}`" + (f" ({times} times)" if times > 1 else ""), ASSISTANT
            )
        elif call.command and _NOTABLE.search(call.command):
            outcome = _outcome(call.command, text)
            self.ledger.add(done, f"`{call.label}` ok" + (f": {outcome}" if outcome else ""), ASSISTANT, 2.0)

    def _facts(self, text: str, besides: str = "") -> None:
        """Facts in plain words of an output, unless the same output was read before."""
        if len(text) < 24 or hash(text) in self._outputs:
            return
        if len(self._outputs) > 5000:
            self._outputs.clear()
        self._outputs[hash(text)] = None
        found = plain_lines(without_injected(text) if "<system-" in text else text)
        common = min(
            1.5, math.log2(len(found) + 1) / 4
        )  # one plain line among code or logs tells more than a page
        for weight, line in sorted(found, key=lambda p: -p[0])[:6]:
            if not besides or besides not in line:
                self.ledger.add(self._placed(FACT), line, TOOL, weight - common - self._routine(line))

    def _routine(self, line: str) -> float:
        """How often a line of this shape was seen: `Checked 12 files in 14 ms.` is routine."""
        if len(self._shapes) > 50_000:
            self._shapes.clear()
        shape = hash(shape_of(line))
        self._shapes[shape] += 1
        return 0.7 * min(4, self._shapes[shape] - 1)


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
    for entry in ledger.find(*_TURN_KINDS):
        entry.gone = True
        done = any(p.match(entry.text) for p in (_COMMAND, _EDITED, _DID))
        kind = {ASKED: GOAL, EARLY: DONE if done else DECISION}.get(entry.kind, FACT)
        ledger.put(
            Entry(kind, entry.text, LATEST if entry.kind == ASKED else entry.who, entry.weight), news=False
        )


# ------------------------------------------------------------------------------------- tools
_CHECKBOX = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+\[([ xX~])\]\s+(.+)$", re.M)
_STATUS = {
    **dict.fromkeys(("completed", "complete", "done", "true", "finished"), DONE),
    **dict.fromkeys(("in_progress", "doing", "active", "started"), DOING),
    **dict.fromkeys(("cancelled", "canceled", "deleted", "skipped"), ""),
}
_NOTABLE = re.compile(
    r"\b(?:test\w*|pytest|jest|vitest|tox|nox|check|lint|mypy|ruff|eslint|tsc|build|make|cargo"
    r"|go (?:test|build|vet)"
    r"|mvn|gradle|npm|pnpm|yarn|bun|docker|kubectl|terraform|alembic|migrat\w+|deploy\w*|pip install|apt|brew"
    r"|git (?:commit|push|merge|rebase|tag|revert|reset|checkout -b|switch -c|branch|stash))\b"
)
_EDITS = re.compile(r"edit|write|patch|replace|create|insert|update_file|notebook", re.I)
_PATCHED = re.compile(r"^\*\*\* (?:Update|Add|Delete) File: (.+)$", re.M)
_EXIT = re.compile(r"(?:exit(?:ed)?(?:[ _](?:with|code|status))*|return ?code)[\"'>:=\s]*(-?\d{1,3})\b", re.I)
_ERROR = re.compile(
    r"\b(?:\w*(?:Error|Exception)|error|fatal|panic|[Ff]ailed|FAILED|denied|not found|No such file|cannot"
    r"|unable|refused|Invalid|invalid)\b"
)
_PLACE = re.compile(r'File "([^"\n]+)", line (\d+)')
_TALLY = re.compile(r"\b\d+ (?:passed|failed|errors?|tests?|examples?|skipped|warnings?)\b[^\n]{0,80}", re.I)
_COMMITTED = re.compile(r"^\[([^\]\n]{1,80})\] (.{1,120})$", re.M)
_FIGURE = re.compile(r"\d(?!\d*(?:[:\t→|-]|\. ))")  # not the number of a line or of a list's item
_CODE_ENDS = frozenset(",({[=+&")
_LISTED = re.compile(r"\d{1,2}[.)] |[0-9a-f]{7,10} ")
_NUMBERED = re.compile(r"\s*\d+(?:→|\t|: ?| ?[|│] ?|-+ )")
_PLAIN = re.compile(
    r"(?:[-*•>#/!]{1,3} )?(?:\[\w+\] )?[A-Za-z$~\d\u3040-\u9fff\uac00-\ud7af][^{}<>|;\\]{5,}$"
)
_PATHS = ("path", "file_path", "filename", "notebook_path", "target_file", "file")
_PLAN_LISTS = ("todos", "plan", "items", "tasks", "steps", "todo_list", "todoList", "task_list")
_PLAN_TEXTS = ("content", "step", "title", "text", "task", "subject", "name", "description")
WINDOW = 16_000


def plan_items(arguments: Mapping[str, object]) -> list[tuple[str, str]]:
    """(status, text) of a todo list or plan among a call's arguments; empty when there is none."""
    for name in _PLAN_LISTS:
        value = arguments.get(name)
        if isinstance(value, str):
            return [
                ("completed" if mark in "xX" else "pending", item) for mark, item in _CHECKBOX.findall(value)
            ]
        items = [x for x in map(_plan_item, value) if x] if isinstance(value, list) else []
        if items:
            return items
    return []


def _plan_item(item: object) -> tuple[str, str] | None:
    if not isinstance(item, dict):
        return None
    text = next((v for n in _PLAN_TEXTS if isinstance(v := item.get(n), str) and v.strip()), None)
    status = next((item[n] for n in ("status", "state", "completed", "done") if n in item), None)
    return (str(status), text) if text is not None and status is not None else None


def call_of(name: str, arguments: Mapping[str, object]) -> Call:
    """What a call does, whichever client made it."""
    command = next((arguments[n] for n in ("command", "cmd", "script") if arguments.get(n)), "")
    path = next((v for n in _PATHS if isinstance(v := arguments.get(n), str) and v), "")
    text = next((v for n in ("input", "patch") if isinstance(v := arguments.get(n), str)), "")
    if isinstance(command, list):
        command = str(command[-1]) if command else ""
    source = text or str(command)
    patched = _PATCHED.search(source[:4000]) if "*** " in source[:4000] else None
    if patched or (path and (_EDITS.search(name) or command in ("create", "str_replace", "insert"))):
        target = cut(clean(patched[1] if patched else path).replace("`", "'"), 200)
        return Call(f"{name} {target}", path=target)
    if command and not path:
        return _command_call(name, str(command))
    return Call(cut(clean(f"{name} {path}"), 90).replace("`", "'") or "tool")


def _command_call(name: str, command: str) -> Call:
    line = re.sub(r"^\s*(?:cd \S+ *(?:&&|;) *)+", "", command[:2000]).strip().split("\n")[0]
    return Call(cut(clean(line), 90).replace("`", "'") or name, command=command[:2000])


def signature(label: str) -> str:
    """What makes two commands the same try: program and first words, without flags and pipes."""
    words = [w for w in re.split(r"[|;&]|2>", label)[0].split() if not w.startswith("-") and "=" not in w]
    return " ".join(words[:3])


def _exit_code(text: str) -> int | None:
    codes = _EXIT.findall(text) if "xit" in text or "eturn" in text else ()
    return int(codes[-1]) if codes else None


def _looks_failed(call: Call, text: str) -> bool:
    code = _exit_code(text[-300:])
    code = _exit_code(text[:80]) if code is None else code
    if code is not None:
        return code != 0
    if text[:40].lstrip().lower().startswith(("error:", "fatal:", "<tool_use_error>", "error ")):
        return True
    return bool(call.command) and "Traceback (most recent call last)" in text[-8000:]


def error_line(text: str) -> str:
    """The line that says what went wrong, word for word, and where if the text tells."""
    tail = text[:4000] + "\n" + text[-12000:] if len(text) > WINDOW else text
    lines = [x for x in tail.split("\n") if x.strip() and not (_EXIT.search(x) and len(x) < 60)] or [
        tail.strip()
    ]
    found = [x for x in lines if _ERROR.search(x)]
    traced = "Traceback" in tail
    line = (found[-1] if traced else found[0]) if found else lines[-1]
    places = _PLACE.findall(tail) if traced else []
    return cut(clean(line), 220) + (f" ({clean(':'.join(places[-1]))})" if places else "")


def _outcome(command: str, text: str) -> str:
    committed = _COMMITTED.search(text[:2000]) if "git" in command else None
    if committed:
        return f"[{committed[1]}] {committed[2]}"
    tallies = _TALLY.findall(text[-3000:])
    return clean(tallies[-1]) if tallies else ""


def plain_lines(text: str) -> list[tuple[float, str]]:
    """(weight, line) of the lines of an output that state something in plain words.

    Of a long output only lines with a figure are looked at: it is code or a page that can be read again.
    """
    if len(text) > 2 * WINDOW:
        text = text[:WINDOW] + "\n" + text[-WINDOW:]
    lines = [x for x in text.split("\n") if 12 <= len(x) <= 400 and (x.count(" ") >= 3 or not x.isascii())]
    if len(text) > 3000:
        lines = [x for x in lines if _FIGURE.search(x)]
    return [(weight, line) for line, weight in map(_plain, lines) if weight >= 1.5]


def _plain(raw: str) -> tuple[str, float]:
    numbered = _NUMBERED.match(raw)
    line = (raw[numbered.end() :] if numbered else raw).strip()
    if not line or line[-1] in _CODE_ENDS or not _PLAIN.match(line) or not looks_like_prose(line):
        return line, 0.0
    if (line.count(" ") < 3 and not _HAN.search(line)) or ("exit" in line and _EXIT.search(line)):
        return line, 0.0
    listed = _LISTED.match(line)
    return line, judge_tool(line[listed.end() :] if listed else line) - 0.9 * bool(listed)


# ------------------------------------------------------------------------------------- the summarizer
def extract(history: Iterable[Message], prefix: Iterable[Message], previous: str | None, *,
            max_chars: int | None = None) -> str:  # fmt: skip
    """The summary of `history`, of the first half `prefix` of a split turn, and of what `previous` holds.

    Each message is read once. The result has at most `max_chars` characters (default: a fifth of the removed
    text, 2,000 to 12,000), and about half of what it replaces at most; the latest request may exceed that.
    """
    reader = Reader(Ledger.of(previous))
    for message in history:
        reader.read(message)
    reader.in_turn = True
    for message in prefix:
        reader.read(message)
    carried = len(previous or "") + reader.carried
    return render_within(reader.ledger, budget_of(reader.chars, carried, max_chars))


def budget_of(removed: int, previous: int, max_chars: int | None) -> int:
    wanted = min(max(int(RATIO * removed) + previous, MIN_CHARS), MAX_CHARS)
    return min(wanted if max_chars is None else max_chars, previous + removed // 2)


def render_within(ledger: Ledger, budget: int) -> str:
    """The fullest summary of at most `budget` characters (but for the latest request)."""
    whole = Ledger(_visible(ledger), ledger.left_out)
    for spare in (False, True):
        text = render(whole, spare=spare)
        if len(text) <= budget:
            return text
    for entry in ledger.find(GOAL, ASKED):
        if entry.who == LATEST or entry.kind == ASKED:
            entry.text = cut_middle(entry.text, max(400, budget // 4))
    room = budget
    while len(text) > budget and room > 0:
        text = render(fit(ledger, room), spare=budget < SPARE)
        room -= max(0, len(text) - budget)
    return text
