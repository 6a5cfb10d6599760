"""Whole runs: long, so only when they are asked for (`-m slow`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import snapshots
from tests.chaos.broken import BROKEN, directed
from tests.chaos.plan import draw
from tests.chaos.run import BROKEN_REST_SECONDS, run


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3])
def test_no_promise_is_broken_by_everything_at_once(tmp_path: Path, members: int) -> None:
    """P1-P7, P12-P14."""
    judgement = run(draw(1, 60, members), tmp_path, print)
    assert judgement.good, judgement.wrong
    assert judgement.counts["written"] > 100
    assert judgement.times


@pytest.mark.slow
def test_snapshots_take_nothing_back_whatever_befalls_them(tmp_path: Path) -> None:
    """P1-P3, P6: a dozen, with writes and faults beside them."""
    judgement = run(snapshots.beside_faults(), tmp_path, print)
    assert judgement.good, judgement.wrong
    assert judgement.counts["duplicates"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_build_is_caught(tmp_path: Path, name: str) -> None:
    """That a run finds nothing says something only if it would find what is there."""
    judgement = run(directed(name), tmp_path, print, broken=name, rest=BROKEN_REST_SECONDS)
    assert not judgement.good


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_the_plan_that_shows_a_broken_build_shows_nothing_of_a_sound_one(tmp_path: Path, name: str) -> None:
    """It is the build that is caught, and not the fault."""
    judgement = run(directed(name), tmp_path, print)
    assert judgement.good, judgement.wrong
