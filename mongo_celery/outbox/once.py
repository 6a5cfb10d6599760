"""Placeholder until written."""

from typing import Any


def once(*a: Any, **k: Any) -> Any:
    """Do not use."""
    raise NotImplementedError
