"""Keys by which documents and messages of ours are signed."""

from __future__ import annotations

import secrets

from bson.binary import Binary

_KEY_BYTES = 32


def new_key() -> Binary:
    """Return a key that nobody knows."""
    return Binary(secrets.token_bytes(_KEY_BYTES))
