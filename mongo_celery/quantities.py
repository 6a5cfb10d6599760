"""Readable quantities: durations, sizes, times and counts."""

from __future__ import annotations

from datetime import datetime

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_KIB = 1024
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def duration(seconds: float | None) -> str:
    """Return seconds as readable text. A dash if unknown."""
    if seconds is None:
        return "-"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def size(count: float | None) -> str:
    """Return bytes as readable text, in units of 1024. A dash if unknown."""
    if count is None:
        return "-"
    if count < _KIB:
        return f"{count:.0f} B"
    scaled, unit = float(count), "B"
    for name in _UNITS:
        if scaled < _KIB:
            break
        scaled, unit = scaled / _KIB, name
    return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"  # noqa: PLR2004 - two digits are enough


def number(count: int, one: str, many: str) -> str:
    """Return a count with its noun."""
    return f"{count} {one if count == 1 else many}"


def moment(at: datetime | str | None) -> str:
    """Return a time in UTC to the second, also from ISO text. A dash if there is none."""
    iso = at.isoformat() if isinstance(at, datetime) else at
    return "-" if iso is None else iso[:19].replace("T", " ") + " UTC"
