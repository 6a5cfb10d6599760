"""One BSON value for all that MongoDB compares equal: `_id: 1` and `_id: 1.0` are the same document."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import bson
from bson.decimal128 import Decimal128


def canonical(value: Any) -> Any:  # noqa: PLR0911 - one answer for each kind of value
    """Numbers that MongoDB compares equal become one BSON value; documents and arrays by their members."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, bson.ObjectId)):
        return value
    if isinstance(value, Decimal128):
        return _canonical_decimal(value)
    if isinstance(value, int):
        return int(value) if _fits(value) else str(value)
    if isinstance(value, float):
        return _canonical_float(value)
    if isinstance(value, Mapping):
        return {str(name): canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    return value


def _canonical_decimal(value: Decimal128) -> Any:
    """Distinct decimals may share a float and so a partition; equal numbers never part."""
    number = value.to_decimal()
    if number.is_nan():
        return math.nan
    if number.is_finite() and number == number.to_integral_value() and _fits(number):
        return int(number)
    return _canonical_float(float(number))


def _canonical_float(value: float) -> Any:
    if math.isnan(value):
        return math.nan  # MongoDB holds all of them equal, whatever their sign and payload
    return int(value) if value.is_integer() and _fits(value) else value


def _fits(number: float | Decimal) -> bool:
    """Whether a whole number is one of BSON's integers."""
    return -(1 << 63) <= number < 1 << 63
