"""Whole runs beside those of `python -m tests.chaos`: long, so only when they are asked for (`-m slow`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.broken import BROKEN, directed
from tests.chaos.run import run


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_the_plan_that_shows_a_broken_build_shows_nothing_of_a_sound_one(tmp_path: Path, name: str) -> None:
    """It is the build that is caught by `--broken all`, and not the fault."""
    judgement = run(directed(name), tmp_path, print)
    assert {promise: sentences for promise, sentences in judgement.wrong.items() if sentences} == {}
