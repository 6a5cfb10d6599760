"""What an execution writes down about an error can always be stored."""

from __future__ import annotations

import bson

from mongo_celery.mongo.verdicts import error_text


def test_an_error_with_a_lone_surrogate_can_be_stored() -> None:
    """P9: file names carry them; an outcome that BSON refuses would be counted as a crash of the worker."""
    text = error_text(FileNotFoundError("no such file: caf\udce9.txt"))

    assert bson.decode(bson.encode({"error": text})) == {"error": text}
    assert text.startswith("FileNotFoundError: no such file: caf")
