"""Keys that sign documents and messages of this package."""

from __future__ import annotations

import secrets

from bson.binary import Binary

_KEY_BYTES = 32


def new_key() -> Binary:
    """Return a new random key."""
    return Binary(secrets.token_bytes(_KEY_BYTES))
