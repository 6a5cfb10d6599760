"""What the bench can fail with."""

from __future__ import annotations

from mongo_celery.errors import MongoCeleryError


class BenchError(MongoCeleryError):
    """
    A measurement did not come to its end. The message says which server did not answer, or which process
    failed, and quotes its log.
    """
