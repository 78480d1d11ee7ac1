"""The context as a picture: one bar a message, as wide as its tokens, coloured by role, in the order of the session.

    title and figures
    [summary][user][assistant][tool ......] | [kept ............]      the whole context on one line, and the cut
    [context ===========                 trigger |             ]       on the scale of the window
    line  what         [bar by role ====] tokens        running        oldest first; a long session: several a row

Plain SVG 1.1 without scripts; what it says of a transcript is what the table says, never the text of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import accumulate, groupby
from unicodedata import east_asian_width

from haocompact.compaction import NoCompaction
from haocompact.pipeline import Planned
from haocompact.show import Row, plan_figures, rows, title

WIDTH, MARGIN, LABELS = 960, 24, 310
BAR, GAP, MAX_BARS, MAX_STEPS = 14, 3, 80, 800
COLOURS = {  # Okabe and Ito's, which stay apart for the colour-blind, on white and on black
    "user": "#0072b2", "assistant": "#e69f00", "tool": "#009e73", "system": "#999999", "summary": "#cc79a7",
    "bash": "#56b4e9", "custom": "#56b4e9", "branch": "#56b4e9",
}  # fmt: skip
FATES = {"previous": "previous summary", "summarise": "summarised", "prefix": "turn prefix, summarised apart",
         "keep": "kept"}  # fmt: skip
GONE = ("previous", "summarise", "prefix")
STYLE = """
  text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #222 } .big { font-size: 16px; font-weight: 600 }
  .dim { fill: #666 } .num { text-anchor: end; font-variant-numeric: tabular-nums } .page { fill: #fff }
  .line { stroke: #d55e00; stroke-width: 2 } .mark { fill: #d55e00; font-weight: 600 } .rail { fill: #eee }
  .gone { fill-opacity: .45 } .fill { fill: #777 }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } .dim { fill: #999 } .page { fill: #16181c } .rail { fill: #2a2d33 } .gone { fill-opacity: .55 }
    .line { stroke: #ff8c42 } .mark { fill: #ff8c42 } }
"""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring messages of one fate that share a bar: tokens by role, lines, largest running total.

    `role` is that of a single message, and `what` what it holds; of several they are empty and their number.
    """

    first: int
    last: int
    count: int
    tokens: dict[str, int]
    running: int
    place: str
    role: str
    what: str

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


def svg(planned: Planned) -> str:
    """The picture of one plan."""
    found = rows(planned)
    if isinstance(planned.outcome, NoCompaction):  # all stays, an earlier summary too
        found = [replace(row, place="keep") for row in found]
    bars = stretches(found)
    figures = plan_figures(planned)
    top = MARGIN + 22 + 17 * len(figures) + 22
    body = [*_overview(planned, found, top), *_legend(found, top + 92), *_bars(bars, top + 136)]
    height = top + 136 + sum(_height(b, before) for b, before in _with_before(bars)) + MARGIN
    head = [_text(MARGIN, MARGIN + 6, _fitted(title(planned)[::-1], 96)[::-1], "big")]
    for i, (label, line) in enumerate(figure.split(maxsplit=1) for figure in figures):
        head += [
            _text(MARGIN, MARGIN + 28 + 17 * i, label, "dim"),
            _text(MARGIN + 64, MARGIN + 28 + 17 * i, line),
        ]
    head += [_text(MARGIN + 70, top + 126, "line", "dim num"), _text(MARGIN + LABELS, top + 126, "tokens", "dim"),
             _text(WIDTH - MARGIN, top + 126, "from the end", "dim num")]  # fmt: skip
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img">',
        f"<title>{_safe(title(planned))}</title>", f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>', *head, *body, "</svg>", "",
    ])  # fmt: skip


def html(planned: Planned) -> str:
    """The picture in a page of its own."""
    name = _safe(title(planned))
    return (f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{name}</title>\n'
            '<meta name="viewport" content="width=device-width">\n'
            "<style>body { margin: 0 } @media (prefers-color-scheme: dark) { body { background: #16181c } } "
            "svg { display: block; max-width: 100%; height: auto; margin: auto }</style>\n"
            f"{svg(planned)}</html>\n")  # fmt: skip


def stretches(found: Sequence[Row], most: int = MAX_BARS) -> list[Stretch]:
    """One a message; where a fate (summarised, kept, ...) has more than `most`, one for several neighbours."""
    made = []
    for place, group in groupby(found, key=lambda row: row.place):
        members = list(group)
        size = -(-len(members) // most)
        made += [_stretch(members[i : i + size], place) for i in range(0, len(members), size)]
    return made


def _stretch(members: Sequence[Row], place: str) -> Stretch:
    tokens: dict[str, int] = {}
    for row in sorted(members, key=lambda row: _rank(row.role)):
        tokens[row.role] = tokens.get(row.role, 0) + row.tokens
    first, count = members[0], len(members)
    role, what = (first.role, first.what) if count == 1 else ("", f"{count:,} messages")
    return Stretch(first.line, members[-1].line, count, tokens, first.running or 0, place, role, what)


def _rank(role: str) -> int:
    """Roles in the order of COLOURS, so that the bars of several messages can be compared."""
    return list(COLOURS).index(role) if role in COLOURS else len(COLOURS)


# --------------------------------------------------------------------------------------- overview
def _overview(planned: Planned, found: Sequence[Row], y: float) -> Iterator[str]:
    """The whole context to scale on one line, with the cut; below it the context against window and trigger."""
    width = WIDTH - 2 * MARGIN
    total = sum(row.tokens for row in found) or 1
    after = next((sum(row.tokens for row in found[i:]) for i, row in enumerate(found) if row.is_cut), None)
    x = float(MARGIN)
    yield f'<rect class="rail" x="{MARGIN}" y="{y}" width="{width}" height="22"/>'
    for part in stretches(found, MAX_STEPS):
        for role, tokens in part.tokens.items():
            step = tokens / total * width
            yield _bar(x, y, step, 22, role, part.place, f"{_lines_of(part)}: {role}, {tokens:,} tokens")
            x += step
    if after is not None:
        cut = MARGIN + (1 - after / total) * width
        anchor, side = (' text-anchor="end"', -5) if cut > WIDTH / 2 else ("", 5)
        yield f'<line class="line" x1="{cut:.1f}" x2="{cut:.1f}" y1="{y - 6}" y2="{y + 28}"/>'
        yield f'<text class="mark" x="{cut + side:.1f}" y="{y - 8}"{anchor}>cut</text>'
    yield from _gauge(planned, y + 48)


def _lines_of(part: Stretch) -> str:
    return f"line {part.first}" if part.count == 1 else f"lines {part.first} to {part.last}"


def _gauge(planned: Planned, y: float) -> Iterator[str]:
    """Tokens of the context on the scale of the window, with the trigger."""
    width, tokens, window = WIDTH - 2 * MARGIN, planned.estimate.tokens, planned.settings.context_window
    scale = width / max(window, tokens, planned.trigger, 1)
    at = MARGIN + max(planned.trigger, 0) * scale
    yield f'<rect class="rail" x="{MARGIN}" y="{y}" width="{width}" height="8"/>'
    yield f'<rect class="fill" x="{MARGIN}" y="{y}" width="{tokens * scale:.1f}" height="8"/>'
    yield f'<line class="line" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 5}" y2="{y + 13}"/>'
    past = f", {tokens - window:,.0f} more than the window of" if tokens > window else " of a window of"
    yield _text(MARGIN, y + 24, f"context {tokens:,.0f}{past} {window:,}", "dim")
    anchor, side = (' text-anchor="end"', -5) if at > WIDTH / 2 else ("", 5)
    yield f'<text class="mark" x="{at + side:.1f}" y="{y - 5}"{anchor}>trigger {planned.trigger:,.0f}</text>'


def _legend(found: Sequence[Row], y: float) -> Iterator[str]:
    x = MARGIN
    for role in sorted({row.role for row in found}, key=lambda role: (_rank(role), role)):
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_colour(role)}"/>'
        yield _text(x + 17, y, role)
        x += 40 + 8 * len(role)
    if any(row.place in GONE for row in found):
        yield _text(x, y, "faded: goes into the summary", "dim")


# ------------------------------------------------------------------------------------------- bars
def _bars(bars: Sequence[Stretch], y: float) -> Iterator[str]:
    largest = max((bar.total for bar in bars), default=1) or 1
    for bar, before in _with_before(bars):
        if bar.place != before:
            yield _fate(bar.place, y + 14)
            y += 24
        yield _row(bar, y, largest)
        y += BAR + GAP


def _with_before(bars: Sequence[Stretch]) -> Iterator[tuple[Stretch, str]]:
    before = ""
    for bar in bars:
        yield bar, before
        before = bar.place


def _height(bar: Stretch, before: str) -> int:
    return BAR + GAP + 24 * (bar.place != before)


def _fate(place: str, y: float) -> str:
    return (f'<line class="line" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y + 4}" y2="{y + 4}" stroke-opacity=".5"/>'
            f'<text class="mark" x="{MARGIN}" y="{y}">{FATES[place]}</text>')  # fmt: skip


def _row(bar: Stretch, y: float, largest: int) -> str:
    """Lines, what it is, the bar by role, its tokens, and the running total from the tail."""
    room = WIDTH - 2 * MARGIN - LABELS - 150
    lines = str(bar.first) if bar.first == bar.last else f"{bar.first}-{bar.last}"
    parts = [
        _text(MARGIN + 70, y + 11, lines, "dim num"),
        _text(MARGIN + 82, y + 11, bar.role),
        _text(MARGIN + (148 if bar.role else 82), y + 11, _fitted(bar.what, 25), "dim"),
    ]
    x = float(MARGIN + LABELS)
    for role, tokens in bar.tokens.items():
        step = tokens / largest * room
        parts.append(_bar(x, y, step, BAR, role, bar.place, f"{role}: {tokens:,} tokens"))
        x += step
    parts.append(f'<text x="{x + 6:.1f}" y="{y + 11}">{bar.total:,}</text>')
    parts.append(f'<text class="dim num" x="{WIDTH - MARGIN}" y="{y + 11}">{bar.running:,}</text>')
    return "".join(parts)


def _bar(x: float, y: float, width: float, height: float, role: str, place: str, tip: str) -> str:
    pale = ' class="gone"' if place in GONE else ""
    return (f'<rect{pale} x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{_colour(role)}">'
            f"<title>{_safe(tip)}</title></rect>")  # fmt: skip


def _colour(role: str) -> str:
    return COLOURS.get(role, "#999999")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}">{_safe(text)}</text>'


def _fitted(text: str, most: int) -> str:
    """Its beginning, at most so many cells wide."""
    widths = list(accumulate(map(_cells, text)))
    return text if not widths or widths[-1] <= most else f"{text[: sum(at < most for at in widths)]}…"


def _cells(character: str) -> int:
    return 2 if east_asian_width(character) in "WF" else 1


def _safe(text: str) -> str:
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))
