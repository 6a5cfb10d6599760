"""
The outbox project behind a web server, as WSGI: `POST /KEY?N` writes the number N to a document, with its task.

With `OUTBOX_BEFORE_FORK` the module writes when it is imported, as an application that a server loads before it forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from tests.acceptance.outbox_project import effect, items

if "OUTBOX_BEFORE_FORK" in os.environ:
    items.insert_one({"_id": "before", "ns": [1]}, tasks=[effect.s("before", 1)])


def web(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Write once; the answer is the process."""
    key, n = environ["PATH_INFO"].strip("/"), int(environ["QUERY_STRING"])
    items.update_one({"_id": key}, {"$push": {"ns": n}}, upsert=True, tasks=[effect.s(key, n)])
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
