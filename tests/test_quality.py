"""The quality bench in small: facts planted in invented sessions, three formats, two rounds."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import quality_facts
import quality_rivals
import quality_sessions


@pytest.mark.parametrize("form", quality_sessions.FORMS)
@pytest.mark.parametrize("wording", ["known", "unseen"])
def test_planted_facts_survive(form, wording):
    told = quality_facts.facts(7, wording)
    assert [sum(f.who == who for f in told) for who in ("user", "assistant", "tool")] == [12, 5, 3]
    stretches = quality_sessions.chunks({}, 7, 2, 60_000)
    stretches[0] = quality_facts.planted(stretches[0], told, 7)
    (*_, summary) = quality_rivals.Way("haocompact", quality_sessions.FORMS).rounds(stretches, form)
    assert len(summary) <= 12_000
    assert [f.text for f in told if f.who == "user" and not f.survives(summary)] == []
    assert sum(f.survives(summary) for f in told) >= 17
    assert wording == "unseen" or not any(f.is_stale(summary) for f in told)


def test_the_same_seed_makes_the_same_session():
    first, again = (quality_sessions.invented(3, 20_000) for _ in range(2))
    assert first == again
    assert quality_facts.facts(3) == quality_facts.facts(3) != quality_facts.facts(4)
