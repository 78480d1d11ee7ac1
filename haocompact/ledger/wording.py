"""The language patterns: sentences, the exact values in them, and what a sentence is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

GOAL, RULE, DONE, DOING, BLOCKED = "goal", "rule", "done", "doing", "blocked"
DECISION, NEXT, FACT, EARLIER = "decision", "next", "fact", "earlier"


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
_FIRST = re.compile(r"(?:[\w' ]{2,20}, )?[\"'(]*([A-Z]\w*)", re.A)  # a capital there is no name,
_AFTER_STOP = re.compile(r"[.:!?] [\"'(]*([A-Z]\w*)", re.A)  # nor there
_NUMBER = re.compile(r"[$€£~+-]?\d[\w.,:%+-]*$", re.A)
HAN = re.compile("[\u3400-\u9fff\u3040-\u30ff\uac00-\ud7af]+")
_HAN_NUMBER = re.compile(
    "[零一二两三四五六七八九十百千万半]+"
    "(?:个|次|天|日|秒|分钟|小时|行|页|元|倍|层|周|月|年|条|台|份|种|人|号)|周[一二三四五六日]"
)
_LATIN = re.compile(r"(?<![\w./-])[a-z]{2,}(?![\w./-])", re.A)  # among Han characters, a name
_HAN_STOP = re.compile("[的了是不要把成为在和请就都也还只别能会将我你他这那个上下用改换]")
_WORD = re.compile(r"[a-z][a-z']+")
_VALUE_WEIGHT = {"num": 0.9, "id": 0.9, "path": 0.6, "code": 0.5, "word": 0.6, "name": 0.4}


def values_of(text: str) -> dict[str, str]:
    """The exact tokens of a sentence, lower case, each with its class: num, path, id, code, word or name."""
    found = {}
    for token in _TOKEN.findall(text):
        if kind := _CLASSES[token]:
            found[token.strip(".:-").lower()] = kind
    if "name" in found.values():
        first = _FIRST.match(text)
        for token in (*((first[1],) if first else ()), *_AFTER_STOP.findall(text)):
            if found.get(token.lower()) == "name":
                del found[token.lower()]
    if not text.isascii() and HAN.search(text):
        found.update(dict.fromkeys(_HAN_NUMBER.findall(text), "num"))
        for word in _LATIN.findall(text):
            found.setdefault(word, "name")
    return found


class _Classes(dict[str, str]):
    """Token -> class, remembered: most words of a session have been seen before."""

    def __missing__(self, token: str) -> str:
        if len(self) > 100_000:
            self.clear()
        self[token] = kind = _class_of(token)
        return kind


_CLASSES = _Classes()


def _class_of(token: str) -> str:
    if token.isalpha():
        if token.islower() and token not in _NUMBERS:
            return ""
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
    """A sentence with what its judges need, each worked out when it is first asked for."""

    __slots__ = ("_cues", "_low", "_values", "_words", "bullet", "lead", "text")

    def __init__(self, text: str, lead: str = "", bullet: bool = False) -> None:
        self.text = text
        self.lead = lead
        self.bullet = bullet
        self._low: str | None = None
        self._words: frozenset[str] | None = None
        self._values: dict[str, str] | None = None
        self._cues: int | None = None

    @property
    def low(self) -> str:
        if self._low is None:
            self._low = f" {self.text.lower().replace('’', chr(39))} "
        return self._low

    @property
    def words(self) -> frozenset[str]:
        if self._words is None:
            self._words = frozenset(_WORD.findall(self.low))
        return self._words

    @property
    def values(self) -> dict[str, str]:
        if self._values is None:
            self._values = values_of(self.text)
        return self._values

    @property
    def cues(self) -> int:
        """The intents that it shows signs of, as a bit set."""
        if self._cues is None:
            self._cues = _cues_in(self)
        return self._cues

    @property
    def substance(self) -> float:
        return sum(map(_VALUE_WEIGHT.__getitem__, self.values.values()))

    @property
    def stems(self) -> set[str]:
        """The words that say what it is about: no stop words, no endings; Chinese by pairs."""
        exact = {w for v, kind in self.values.items() if kind != "code" for w in _WORD.findall(v)}
        stems = {stem(w) for w in self.words - _STOP - exact if len(w) > 2} - _STOP
        for run in () if self.text.isascii() else HAN.findall(self.text):
            stems.update(p for i in range(len(run) - 1) if not _HAN_STOP.search(p := run[i : i + 2]))
        return stems


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    for ending in ("'s", "ies", "ing", "ed", "es", "s", "ly", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


# ------------------------------------------------------------------------------------- sentences
_END = re.compile(r"[.!?][\"')*”’]?\s+|[。！？；]\s*")
_SHORTENED = ("e.g.", "i.e.", "etc.", " vs.", " no.", " No.")
_WRAP = re.compile(r"\n(?=[a-z])(?<=[\w,)]\n)")
_INLINE = re.compile(r"`[^`]*`|\(\)")
_BULLET = re.compile(r"\s*(?:(?:[-*•+]|\d{1,2}[.)、]|[（(]\d{1,2}[)）])\s+(?:\[[ xX~]\]\s*)?|>\s?)")
FLAT_BULLET = re.compile(r" (?:[-•] |\d\. )(?=\S)")
_LOOSE = re.compile(
    r"at (?:async )?[\w.<>$]+ ?\(|File \"|\+\+\+|---|@@|[|$➜]|(?:import|from) [\w.{}*, ]+ (?:import|from) "
    r"|import [\w.]+$"
)


def sentences(text: str, *, telling: bool = False) -> Iterator[Said]:
    """Sentences of prose with the heading or colon line above their list; code and logs are left out.

    `telling` leaves out lines that have no figure and decide nothing.
    """
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
        if telling and not (is_lead or tells(body)):
            continue
        for part in _parts(body):
            if len(part) > 2 and looks_like_prose(part):
                yield Said(part, lead, bool(bullet))
        lead = body if is_lead else lead if bullet else ""


def tells(line: str) -> bool:
    """A quick look: is there a figure, or a word that decides?"""
    if _DIGIT.search(line) is not None:
        return True
    said = Said(line)
    return not (line.isascii() and said.words.isdisjoint(DECIDES.hints)) and said in DECIDES


def _parts(line: str) -> Iterator[str]:
    """The line, cut after each full stop that ends a sentence."""
    start = 0
    for end in _END.finditer(line):
        if not line[: end.start() + 1].endswith(_SHORTENED):
            yield line[start : end.end()].rstrip()
            start = end.end()
    if start < len(line):
        yield line[start:]


_MARKS = re.compile(r'[{}();=<>|\\\[\]"]')


def looks_like_prose(text: str) -> bool:
    """Words with few code marks: `x = f(y);` and `at foo (a.js:1:2)` are none."""
    if "\\n" in text or (text.endswith(",") and len(text) < 50):
        return False
    bare = _INLINE.sub("", text) if "`" in text or "()" in text else text
    marks = len(_MARKS.findall(bare))
    if not text.isascii() and HAN.search(text):
        return marks * 5 <= len(text)
    return marks * 11 <= len(text) and not _LOOSE.match(text) and not text.endswith((";", "{", "}"))


# ------------------------------------------------------------------------------------- what a sentence is
class Cue:
    """Signs of one intent: whole words, phrases (a blank stands for a word's edge), and CJK substrings."""

    def __init__(self, words: str, phrases: str, cjk: str = "") -> None:
        self.words = _set(words)
        self.hints = set(self.words)  # without one of these, an English sentence shows no sign of it
        self.bit = 1 << len(_CUES)
        _CUES.append(self)
        for word in self.words:
            _WORD_CUES[word] = _WORD_CUES.get(word, 0) | self.bit
        for phrase in phrases.split():
            self.hints.add(_add_phrase(phrase.replace("_", " "), self.bit))
        for sign in cjk.split():
            _CJK_CUES.setdefault(sign[0], []).append((sign, self.bit))

    def __contains__(self, said: object) -> bool:
        return isinstance(said, Said) and bool(said.cues & self.bit)


_CUES: list[Cue] = []
_WORD_CUES: dict[str, int] = {}
_PHRASE_CUES: dict[str, list[tuple[str, int]]] = {}  # by the phrase's rarest whole word
_CJK_CUES: dict[str, list[tuple[str, int]]] = {}  # by the first character


def _add_phrase(phrase: str, bit: int) -> str:
    """Found through its longest word that can't be a part of a longer one, which is returned."""
    whole = re.findall(r"(?<![a-z'])[a-z][a-z']+(?![a-z']|$)", phrase)
    longest: str = max(whole, key=len)
    _PHRASE_CUES.setdefault(longest, []).append((phrase, bit))
    return longest


def _cues_in(said: Said) -> int:
    found = 0
    for word in said.words & _ENGLISH_CUES:
        found |= _WORD_CUES.get(word, 0)
        for phrase, bit in _PHRASE_CUES.get(word, ()):
            if not found & bit and phrase in said.low:
                found |= bit
    if not said.text.isascii():
        for first in _CJK_CUES.keys() & set(said.text):
            for sign, bit in _CJK_CUES[first]:
                if not found & bit and sign in said.text:
                    found |= bit
    return found


STRONG = Cue(
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
WEAK = Cue(
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
AIM = Cue(
    "goal goals aim aims aiming objective purpose mission eventually ultimately deliverable hope hoping",
    """_trying_to_ _i_want_ _we_want_ _we_need_ _i_need_ _i'd_like_ _the_point_ _so_that_ _end_up_with_
    _the_idea_ _the_task _your_task _your_job _in_the_end _after_is_ _we're_after _i'm_after _we_plan_
    _intend_to_ _to_be_able_to_ _what_matters _the_plan_is""",
    "目标 目的 想要 希望 任务 最终 打算 計画 目標 목표",
)
DECIDES = Cue(
    """decide decided decision decisions chose choose chosen choice settled opted opt picked pick rejected
    adopt adopted because therefore agreed concluded discarded""",
    """_went_with _go_with _going_with _ruled_out _trade-off _instead_of_ _rather_than_ _turned_out
    _turns_out _root_cause _the_reason _which_is_why _due_to_ _plan_to_""",
    "决定 选择 选用 采用 因为 之所以 改用 原因 结论 选定 放弃 決定 採用 ため 결정 선택 때문",
)
STATES = Cue(
    """is are was were has had uses used runs ran listens expires returns stores stored takes took costs
    lives sits needs requires accepts allows rejects supports contains holds belongs owns owned handles
    measured found points defaults called named comes came falls drops fails failed means starts ends
    became equals sends caps capped limited reached peaked averages lasts lags remains seen reported
    keeps reads writes scans depends expects throws talks offers ships serves breaks slips hits sends
    allocates exceeds""",
    "_will_be_ _set_to_ _can_be_",
    "是 为 在 有 用 需 耗时 位于 达到 超过 低于 です ます 입니다",
)
CORRECTS = Cue(
    """actually instead correction change changed changing changes switch switched replace replaced rename
    renamed sorry oops mixed revise revised superseded supersedes bump bumped raise raised lower lowered
    increase increased reduce reduced extend extended update updated wrong mistake override overridden
    outdated stale now moved move meant misspoke rather migrated swap swapped postponed
    slips slipped delayed shifted rescheduled deferred bumped doubled halved""",
    """_no_longer_ ,_not_ _scratch_that _on_second_th _make_it_ _make_that_ _pushed_ _after_all _turns_out
    _not_right _changed_my_mind _these_days _from_now_on _than_i_said _forget_ _i_said_ _hmm_ ._no,_
    _on_reflection _from_today _in_place_of_ _second_thought""",
    """改成 改为 换 改用 改到 改名 更名 改由 挪到 移到 延长 缩短 还是 其实 更正 不再 不用了 取消
    调整 应为 而不是 说错 搞错 推迟 提前到 変更 訂正
    代わりに 실은 변경 대신""",
)
SURELY = Cue(
    "actually instead correction sorry oops misspoke mistake wrong rather",
    """_no_longer_ ,_not_ _scratch_that _on_second_th _changed_my_mind _these_days _from_now_on _than_i_said
    _i_said_ _hmm_ ._no,_ _on_reflection _from_today _in_place_of_""",
    "改成 改为 换 改用 改到 改名 更名 改由 其实 更正 不再 不用了 而不是 说错 搞错 変更 訂正 변경",
)
TELLS = Cue(
    """note warning important limit limited limits expire expires deadline only requires required default
    defaults must max maximum min minimum deprecated removed port version quota owner scheduled downtime
    until since budget retention timeout endpoint threshold reserved locked unsupported disabled enabled
    frozen maintenance contact lags behind region plan""",
    "_will_be_ _at_most_ _up_to_",
    "注意 警告 限制 到期 默认 必须 版本 端口 上限",
)
PLANS = Cue(
    "remaining todo",
    "next_step still_to_do to_do left_to_do action_items plan: what's_left",
    "下一步 待办 剩余 接下来 次の",
)
_ENGLISH_CUES = frozenset((*_WORD_CUES, *_PHRASE_CUES))
_NARRATES = re.compile(
    r"(?:now,? )?(?:let me|let['’]s|i['’]ll|i will|i['’]m (?:going|now)|i need to|i should|i can see|i see"
    r"|next,|first,|perfect|great|good|excellent|done|ok(?:ay)?\b|sure|looking|checking|here['’]s"
    r"|here (?:is|are)"
    r"|the user|you['’]re|wait|hmm|thank|sorry|now\b|would you|do you|shall i|what would|you can"
    r"|让我|我来|现在|好的|接下来|首先|我会|我将)",
    re.I,
)
DID = re.compile(
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
_REFERS = re.compile(
    r"\b(?:it|this|that|these|those|them|why|there|again|same)\b|[它这那]|为什么|为何|原因", re.I
)
_ADDRESSES = re.compile(
    r"\b(?:you (?:must|should|shall|are (?:to|now)|have to|need to|may not)|ignore (?:all|any|the|previous|prior)"
    r"|disregard|(?:your|these|following|previous) (?:instructions|rules|guidelines)|system prompt)\b"
    r"|忽略|无视|你必须|你应该|你现在",
    re.I,
)
_OWN = (" i'm ", " i am ", " my ", " our ", " we ", " for me ", " to me ", " the ", " you'll ")


def refers_back(said: Said) -> bool:
    """Does it point at something that was said before, and name nothing itself?"""
    return not said.values and _width(said.text) < 120 and _REFERS.search(said.text) is not None


@lru_cache(maxsize=256)
def leads_to(lead: str, cue: Cue) -> bool:
    """Whether the line above a list announces this intent."""
    return Said(lead) in cue


def judge_user(said: Said) -> tuple[str, float]:
    """(kind, weight) of one sentence of the user. Rules weigh most, a bare question least."""
    text = said.text
    rule = 3.0 * (said in STRONG or said.low.startswith(" no ")) + 1.0 * (said in WEAK)
    if not rule and said.lead and leads_to(said.lead, STRONG):
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


def judge_assistant(said: Said, floor: float = -9.0) -> tuple[str, float]:
    """(kind, weight) of one sentence of the assistant; narration weighs least. Exact from `floor` upwards.

    What costs least is looked at first: most sentences can't reach the floor whatever they say.
    """
    text = said.text
    plain = not said.bullet and text.endswith((".", "。", "!")) and "**" not in text
    weight = 1.2 * plain - 0.8 * said.bullet - 0.3 * min(3, text.count("`") // 2) - len(text) / 120
    weight -= 2 * (_width(text) < 30) + 3 * text.endswith((":", "：", "?", "？"))
    if weight + 3.2 + 0.4 + 1 < floor:
        return FACT, -9.0
    quoted = sum(f"`{v}" in said.low or f"{v}`" in said.low for v in said.values) if "`" in text else 0
    weight += min(said.substance - 0.3 * quoted, 3.2)
    if weight + 0.4 + 1 < floor:
        return FACT, -9.0
    decides, states = said in DECIDES, said in STATES
    if not decides and (not said.values or _NARRATES.match(text)):
        return FACT, -4.0
    weight += 0.4 * states - 1.2 * (not (plain or states or decides))
    if not said.values and _NARRATES.match(text):
        return FACT, weight - 4
    if decides:
        return DECISION, weight + 1
    return (DONE, weight - 1) if DID.match(text) else (FACT, weight)


def judge_tool(line: str, floor: float = -9.0) -> float:
    """Weight of one line of a tool's output as a fact in plain words. Exact from `floor` upwards."""
    weight = 0.5 * line.endswith((".", "。")) + 0.3 * line[:1].isupper() - len(line) / 160
    weight -= (
        min(3.0, 0.4 * len(_LINE_MARKS.findall(line))) + _LOW_LINE.get(line[:2], 0.0) + 2 * (" = " in line)
    )
    if weight + 2.4 + 2.1 < floor:
        return -9.0
    said = Said(line)
    weight += min(said.substance, 2.4)
    if weight + 2.1 < floor:
        return -9.0
    if _ADDRESSES.search(line):  # a tool gives no orders
        return -9.0
    prose = not said.words.isdisjoint(_JOINS) or not (line.isascii() or not HAN.search(line))
    return weight + 0.9 * prose + 0.6 * (said in STATES) + 0.6 * (said in TELLS)


_LINE_MARKS = re.compile(r'[{}()=<>|\\\[\]"`*_#]')
_JOINS = _set(
    "the of to in on at by with than for and until before after from over per is are was not will has an be"
)
TELLING = frozenset(
    form
    for w in _JOINS | STATES.words | TELLS.words
    for form in (w, w.capitalize(), f"{w}:", f"{w.capitalize()}:")
)
_LOW_LINE = {
    "//": 1.2,
    "* ": 1.2,
    "# ": 1.0,
    "##": 3.0,
    "- ": 0.5,
    "> ": 0.5,
    "/*": 1.2,
    "dr": 0.5,
    "-r": 2.0,
}


def _width(text: str) -> int:
    """Length in columns of type, roughly: a Han character says as much as a word."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
