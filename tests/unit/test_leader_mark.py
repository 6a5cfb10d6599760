"""What a listener reads of a mark that anybody may have written, and what it takes for life."""

from __future__ import annotations

from typing import Any

import pytest

from mongo_celery.bridge.listener.mark import LeaderMark, SignsOfLife

NOTICE: dict[str, Any] = {
    "installation": "i", "app": "shop", "host": "h", "pid": "7", "term": "t", "beat": 3,
}  # fmt: skip


def mark(term: str, beat: int) -> LeaderMark:
    found = LeaderMark.read({**NOTICE, "term": term, "beat": beat})
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [{"installation": None}, {"term": ""}, {"beat": "3"}, {"beat": True}, {"beat": 1.5}, {"beat": None}],
    ids=str,
)
def test_what_is_no_mark_is_not_read(change: dict[str, Any]) -> None:
    """Nor does it raise."""
    assert LeaderMark.read({**NOTICE, **change}) is None


def test_what_a_mark_says_of_itself_is_fit_for_a_log() -> None:
    """No line breaks, no lengths without end, whatever the types."""
    found = LeaderMark.read({**NOTICE, "app": "a\nb" + "x" * 9999, "host": {"deep": [1]}, "pid": None})
    assert found is not None
    assert found.who.isprintable()
    assert len(found.who) < 600
    assert "unknown" in found.who


def test_only_a_mark_that_has_changed_is_a_sign_of_life() -> None:
    """Not one that was put back, nor an older one that comes late, nor one of another term."""
    signs = SignsOfLife()
    assert not signs.show(mark("t", 3))
    assert not signs.show(mark("t", 3))
    assert not signs.show(mark("t", 2))
    assert not signs.show(mark("other", 9))
    assert signs.show(mark("t", 4))
    assert not signs.show(mark("t", 4))


def test_any_number_of_terms_costs_no_memory() -> None:
    """A flood of forged ones makes it forget, and no more."""
    signs = SignsOfLife()
    for number in range(10_000):
        signs.show(mark(f"t{number}", 1))
    assert len(signs._beats) <= 100
