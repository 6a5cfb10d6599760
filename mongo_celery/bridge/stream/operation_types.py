"""
The operation types of change events: those this version knows, and what a handler may ask for.

Servers send more with every version. A handler gets what it asks for by name, or everything by `"*"`. A name
that looks like a known one is taken for a misspelt one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.errors import ConfigurationError

ALL = "*"
"""Every operation type, those included that only a later server sends."""

DOCUMENT_OPERATIONS = frozenset({"insert", "update", "replace", "delete"})
"""Changes of one document: they have a document key."""

OPERATIONS = DOCUMENT_OPERATIONS | {"drop", "rename", "dropDatabase", "invalidate"}
"""What every server sends."""

EXPANDED_OPERATIONS = frozenset(
    {
        "create",
        "createIndexes",
        "dropIndexes",
        "modify",
        "refineCollectionShardKey",
        "reshardCollection",
        "shardCollection",
    },
)
"""What a server sends with `showExpandedEvents` only (MongoDB 6.0 and later)."""

WITH_NAMESPACE = (OPERATIONS | EXPANDED_OPERATIONS) - {"invalidate"}
"""Those of which it is known that the event names a database."""

MOVES = frozenset({"drop", "rename", "dropDatabase", "invalidate"})
"""By which a collection is another one afterwards, or none."""

TAKES_DOCUMENTS = frozenset({"insert", "update", "replace"})
"""Whoever asks for one of these handles documents, so that it can be given those that exist."""

_SNAPSHOT = (
    "operation 'snapshot' is none of the stream's: existing documents come to a handler with start_from='snapshot', or "
    "by `celery -A APP changes snapshot start HANDLER`, whatever operations it asks for. Leave it out."
)
_ALL_ALONE = "operations='*' is all of them, so give it alone, as operations='*' or operations={'*'}."


def check_operations(asked: Collection[str]) -> frozenset[str]:
    """
    Return the operation types that a handler asks for.

    Raises:
        ConfigurationError: a name is nearly one that is known, or `"*"` is not alone.
    """
    names = frozenset(asked)
    if ALL in names and len(names) > 1:
        raise ConfigurationError(_ALL_ALONE)
    if SNAPSHOT in names:
        raise ConfigurationError(_SNAPSHOT)
    known = {name.lower(): name for name in OPERATIONS | EXPANDED_OPERATIONS}
    for name in sorted(names - {ALL, *known.values()}):
        near = difflib.get_close_matches(name.lower(), known, n=1)
        if near or not name.isidentifier():
            meant = f" (did you mean {known[near[0]]!r}?)" if near else ""
            raise ConfigurationError(
                f"operation {name!r} is unknown{meant}; what only a later server sends comes with operations='*'.",
            )
    return names


def check_are_sent(asked: Collection[str], *, expanded: bool) -> None:
    """
    Refuse operation types that would never come.

    Args:
        asked: of one handler.
        expanded: the bridge's option `show_expanded_events`.

    Raises:
        ConfigurationError: the stream does not show events of a type that is asked for.
    """
    never = sorted(set(asked) - OPERATIONS - {ALL})
    if never and not expanded:
        raise ConfigurationError(
            f"operations {', '.join(map(repr, never))} would never come: without the bridge's option "
            "show_expanded_events=True (MongoDB 6.0 or later) a server sends only "
            f"{', '.join(sorted(OPERATIONS))}. Set it, or correct the name.",
        )
