"""Parts of a preflight that ask MongoDB: an error of one is a finding, and the others are looked at all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pymongo.errors import PyMongoError

from mongo_celery.errors import MongoCeleryError
from mongo_celery.findings import Finding, failing
from mongo_celery.mongo.opening import error_sentence
from mongo_celery.mongo.redaction import without_credentials
from mongo_celery.mongo.verdicts import Concern


def collect_findings(name: str, part: Callable[[], Iterable[Finding]], concern: Concern) -> list[Finding]:
    """Return the findings of a part of a preflight; an error that ends it early is one more, by this name."""
    found: list[Finding] = []
    try:
        for finding in part():
            found.append(finding)  # noqa: PERF402 - what was found before an error counts
    except MongoCeleryError as failure:
        found.append(failing(name, without_credentials(str(failure))))
    except PyMongoError as failure:
        found.append(failing(name, without_credentials(error_sentence(failure, concern))))
    return found
