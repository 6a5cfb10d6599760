"""MongoDB's limit of 16 MB for a document."""

from __future__ import annotations

from pymongo.errors import DocumentTooLarge, OperationFailure, WriteError

from mongo_celery.errors import OutboxRefusedError

_TOO_LARGE = {10334, 17419, 17420}
"""BSONObjectTooLarge, and the updates' own numbers."""

_BAD_VALUE = 2
"""What an insert says to the same."""


def is_too_large(error: BaseException | None) -> bool:
    """Whether a write failed because its document would be larger."""
    code = error.code if isinstance(error, (OperationFailure, WriteError)) else None
    inserted = code == _BAD_VALUE and "too large" in str(error)
    return isinstance(error, DocumentTooLarge) or code in _TOO_LARGE or inserted


class size_errors:  # noqa: N801 - reads as a phrase
    """Say in our words that a document would be larger than 16 MB."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if is_too_large(error):
            raise OutboxRefusedError(
                f"the document with its entries would be larger than 16 MB; nothing was written to {self._namespace}. "
                "Pass ids instead of values to the tasks, or keep less in the document.",
            ) from error
