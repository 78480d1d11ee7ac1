"""Tokens of CJK and other non-ASCII text without a tokenizer: one fixed weight a class of characters."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

# The 549 Han and 129 Hangul characters that are one token of their own in cl100k_base.
# In o200k_base all 678 are one token, too.
_COMMON: Final = (
    "一万三上下不与专业东两个中串为主么义之也书了事二于五些交产享京人亿今介从他付代以们件价任份企优会传但位体"
    "何余作你使例供価保信修倍值停像元先入全公共关其具内円册再写出击分列则初利别到制前力功加务动動包化北区十午"
    "华单南即历原去县参及友反发取变口只可台右号司合同名后向否含听启告员周命和品哈商問器四回因国图土在地场址型"
    "城基報場填增声处备复外多大天失头女好如始子字存学安宋完定实审客家容密对导将小少尔就局展山岁州工左已市布常"
    "平年并广序库应店度建开异式引张当录形影径待後得微心必志态思性总息您情意感成我或户所手打找技投报拉持指按换"
    "据排接推提播支收改放政效数整文料断新方族无日时明易星是時景更最月有服期木未本机权束条来板构析果查标样核格"
    "案检模次款止正此步歳段每比民気水求江汽没治法注活流海消清游源火点無然片版物特率环现球理生用由电男画界番登"
    "的监目直相省看県真知码确示社票私种科秒称移程稍税稿空立站章端笑符第等签简算管箱米类系素索约级线组经结给络"
    "统编网置美老考者而联能自至色节英藏行表装西要見见规视角解言計記話読计认议记论设证评试话询该详语误说请读调"
    "象责败账货购费资起超路身车转软载辑输达过运近还这进连述退送选通速造連道邮部都配释里重量金钟钮链销错键长開"
    "間関门闭问间队阳陆限院除雅集雷需非面音页项预频题额首验高黑가간값개거게결경고공과구그글기나내는능니다당대"
    "도동되된드든들디라래러력로록료류른를름리만메면명목문미버번보복부분비사산상색생서성세션소수스습시식신아야"
    "어에여열오와요용우운원위으은을음의이인일임입자작장재적전정제져조주지진째체출치크태터턴트튼하한할함해호화"
    "환회"
)

_DEFAULT_QUARTERS: Final = 4

# (quarters of a token for each character, the characters); what no row matches costs _DEFAULT_QUARTERS.
# The order matters only in that the common Han and Hangul are taken out before the others.
_CLASSES: Final = (
    (1, r"[\x00-\x7f\u2500\u2501\u2550]+"),
    (4, f"[{_COMMON}]+"),
    (10, r"[\u1100-\u11ff\u3400-\u9fff\uac00-\ufaff\U00010000-\U0010ffff]+"),
    (6, r"[\u00c0-\u024f\u1e00-\u1eff]+"),
    (2, r"[\u0400-\u052f]+"),
    (3, r"[\u0600-\u06ff]+"),
)


@cache
def _classes() -> list[tuple[int, re.Pattern[str]]]:
    """Compiled when a text that is not ASCII comes along."""
    return [(quarters, re.compile(characters)) for quarters, characters in _CLASSES]


def cjk_quarters(text: str) -> int:
    """Estimated tokens of a text, times four; an ASCII text costs O(1) and gives its length (pi's chars/4).

    Quarters of a token a character: 1 ASCII and horizontal rules, 2 Cyrillic, 3 Arabic, 6 accented Latin,
    4 kana, the 678 common Han and Hangul, CJK punctuation and all that is not listed, 10 every other Han and
    Hangul, emoji and all else beyond U+FFFF. Never below chars/4 in UTF-16 units; the sum over parts is
    the figure of the whole.

    Fitted with tiktoken: the lowest whole weights at which each of 64 paragraphs and 2,429 windows of 100
    characters of Chinese, Japanese and Korean prose gets at least 0.95 of its true count in both o200k_base
    and cl100k_base (worst: 0.972 of cl100k_base).
    """
    if text.isascii():
        return len(text)
    quarters = 0
    for weight, characters in _classes():
        rest = characters.sub("", text)
        quarters += weight * (len(text) - len(rest))
        text = rest
    return quarters + _DEFAULT_QUARTERS * len(text)
