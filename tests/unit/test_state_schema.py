"""The number of the stored state's schema belongs to the names of its fields."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from mongo_celery.bridge.state.schema import SCHEMA

PAGE = Path(__file__).parents[2] / "docs/reference/state.md"


def test_other_fields_have_another_schema_number() -> None:
    """
    P9: a version that renames a stored field must refuse the state of an earlier one, or it overlooks that field.

    After a rename or another meaning, raise SCHEMA. Then, or if a field was only added, note the new hash here.
    `tests/integration/test_stored_state.py` compares the page with a state.
    """
    fields = {*re.findall(r"`(\w+)`|^ +(\w+): ", PAGE.read_text(), re.MULTILINE)}
    digest = hashlib.sha256(repr(sorted(fields)).encode()).hexdigest()[:16]
    assert (SCHEMA, digest) == (2, "c3e525d90920f64d")
