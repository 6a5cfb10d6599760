"""How a snapshot looks on a terminal: one line, that says how far it is and what keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mongo_celery.quantities import duration

_STYLES = {"running": "cyan", "done": "green", "failed": "red", "source gone": "red", "stopped": "yellow"}


def progress_line(each: Mapping[str, Any]) -> str:
    """`shop.orders for summarise: running, 5000 of 20000 read (25%), 800/s, 19 s left`."""
    amount = f"{each['done']} read"
    if each["estimated"] and each["state"] != "done":
        share = min(each["done"] / each["estimated"], 1.0)
        amount = f"{each['done']} of {each['estimated']} read ({share:.0%})"
    facts = [each["state"], amount]
    if each["state"] == "running" and each["per_second"]:
        facts.append(f"{each['per_second']:.0f}/s")
    if each["remaining_seconds"] is not None:
        facts.append(f"{duration(each['remaining_seconds'])} left")
    said = f": {each['reason']}" if each["reason"] else ""
    return f"{each['source']} for {each['handler']}: {', '.join(facts)}{said}"


def progress_style(each: Mapping[str, Any]) -> str:
    """The color of its state."""
    return _STYLES.get(each["state"], "")
