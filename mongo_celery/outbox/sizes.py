"""MongoDB's limit of 16 MB for a document."""

from __future__ import annotations

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.verdicts import is_too_large


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
