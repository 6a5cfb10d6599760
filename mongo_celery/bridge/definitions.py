"""What a process would do with the stream, in digests: so that listeners can tell whose handlers are newer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bson import json_util

from mongo_celery.app import app_name
from mongo_celery.bridge.state.candidates import Definitions

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.options import BridgeOptions
    from mongo_celery.bridge.stream.source import Selector
    from mongo_celery.bridge.wiring import Wiring

_DIGEST_CHARS = 16


def definitions_of(wiring: Wiring, selectors: Iterable[Selector]) -> Definitions:
    """
    The definitions of this process.

    Args:
        wiring: of the bridge.
        selectors: resolved sources and filters, in the order of the handlers.
    """
    options = wiring.options
    handlers = {
        handler.name: _digest(_defined(handler, selector, options))
        for handler, selector in zip(wiring.handlers, selectors, strict=True)
    }
    stream = [
        options.partitions,
        options.queue_count,
        options.full_document,
        options.full_document_before_change,
        options.show_expanded_events,
    ]
    return Definitions(
        app_name(wiring.app),
        {handler.name: handler.task_name for handler in wiring.handlers},
        handlers,
        _digest([sorted(handlers.items()), stream, options.pipeline]),
    )


def _defined(handler: Handler, selector: Selector, options: BridgeOptions) -> list[Any]:
    filter_ = selector.filter
    return [
        handler.task_name,
        sorted(str(source) for source in selector.sources),
        sorted(filter_.operations),
        sorted(filter_.fields) if filter_.fields is not None else None,
        filter_.match,
        handler.partitioner(options).name,
        handler.policy(options),
        handler.transactional,
        handler.group,
        # Only where they are used: the digest of every other handler stays what earlier versions have made of it.
        *([["given", handler.batch_size, handler.coalesce]] if handler.is_parted else []),
        *(["bookkeeping"] if filter_.bookkeeping else []),
    ]


def _digest(value: object) -> str:
    # What JSON does not know counts by its type: an address in its text would make each process another.
    text = json_util.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
