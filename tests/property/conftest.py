"""Fixtures of the property rung."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_looking_for_garbage() -> Iterator[None]:
    """A search makes millions of values and no cycles: without a collector it takes two thirds of the time."""
    gc.disable()
    yield
    gc.enable()
