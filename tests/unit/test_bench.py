"""The parameters of the bench. `tests/acceptance/test_bench.py` runs it."""

from __future__ import annotations

import bson

from mongo_celery.bench.payload import make_order
from mongo_celery.bench.run import MODES


def test_what_is_read_ahead_is_little() -> None:
    """A listener may have read 2,000 changes before the first handler starts, which are in no figure."""
    assert min(500 * MODES[name].scale for name in ("bridge_runs", "bridge_bulk")) >= 20 * 2000


def test_the_payload_is_about_600_bytes_and_equally_long() -> None:
    (size,) = {len(bson.encode(make_order(number))) for number in (0, 1, 999)}
    assert 550 <= size <= 650
