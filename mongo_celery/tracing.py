"""
OpenTelemetry traces across processes, and across waits in MongoDB.

::

    listener   send shop/summarise        (producer)   its context: headers of the message and of the link after it
    worker       process shop/summarise   (consumer)   one for each change of the run
    worker       commit shop/summarise    (client)

    writer     any write through an outbox             its context: stored in the entry
    relay        send shop.tasks.ship     (producer)   child of the write, linked to the publishing span

Only this module imports the API, at first use. Without the API, or without an SDK and a trace from other code, nothing
is sent or stored. The global propagator determines the formats (W3C `traceparent` by default), and the SDK which spans
it keeps.

`opentelemetry-instrumentation-celery` has its own spans for message and task, with the same headers. If it is active,
ours are internal: around its producer span, and inside its consumer span.

A trace context is not signed and has no power. With any header or stored value, at worst a span has no parent or a
foreign one. An error of a tracer, a propagator or an exporter is logged once and goes no further.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded

from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.mongo.verdicts import error_text, traceback_text

logger = logging.getLogger("mongo_celery.tracing")

T = TypeVar("T")
Headers = Mapping[str, str]
Attributes = Callable[[], Mapping[str, Any]]
Begun = tuple[Any, Any]
"""A trace context, and the span that ends with its block. None if the span is not ours."""

STORED_BYTES_MAX = 1024
"""Limit for the trace context in an outbox entry. Larger baggage is omitted, so that documents do not grow."""

_HEADER_CHARS_MAX = 8192
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REPORTS_MAX = 16
_CELERY_INSTRUMENTATION = "opentelemetry.instrumentation.celery"
_DECISIONS = (Ignore, Retry, StaleFencingTokenError)
"""Exceptions by which a task ends without failing: it repeats later, or a newer execution continues."""

_reported: set[str] = set()


class _Api(NamedTuple):
    context: Any
    propagate: Any
    trace: Any
    tracer: Any

    def fields(self) -> Collection[str]:
        """Return the names of the headers that carry a trace."""
        found: Collection[str] = self.propagate.get_global_textmap().fields
        return found


@cache
def _api() -> _Api | None:
    try:
        from opentelemetry import context, propagate, trace
    except ImportError:
        return None
    except Exception as error:  # noqa: BLE001 - a propagator that is configured and not installed
        _report(error)
        return None
    return _Api(context, propagate, trace, trace.get_tracer("mongo_celery"))


def _report(error: BaseException) -> None:
    """Log an error once for each kind, because an exporter may fail for each span."""
    kind = type(error).__qualname__
    if kind not in _reported and len(_reported) < _REPORTS_MAX:
        _reported.add(kind)
        logger.warning(
            "Tracing failed. Everything else continues: %s", error_text(error), extra={"event": "tracing_failed"}
        )


def _guard(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except SoftTimeLimitExceeded:  # it is for the handler, which uses this time
        raise
    except Exception as error:  # noqa: BLE001 - of a tracer, a propagator, a processor or an exporter
        _report(error)
        return otherwise


def trace_headers() -> dict[str, str]:
    """Return the current trace context as message headers. Empty if there is none."""
    api = _api()
    if api is None:
        return {}
    found: dict[str, str] = {}
    _guard(lambda: api.propagate.inject(found), None)
    return {name: value for name, value in found.items() if _is_header(name, value)}


def trace_to_store() -> dict[str, str]:
    """Return these headers within `STORED_BYTES_MAX`. The trace comes first. Headers beyond the limit are omitted."""
    kept, room = dict[str, str](), STORED_BYTES_MAX
    for name, value in trace_headers().items():
        if len(name) + len(value) <= room:
            kept[name] = value
            room -= len(name) + len(value)
    return kept


def stored_trace(value: object) -> dict[str, str]:
    """Return a stored trace context without invalid parts, because any writer may have changed it."""
    if not isinstance(value, Mapping):
        return {}
    return {name: text for name, text in value.items() if _is_header(name, text)}


def _is_header(name: object, value: object) -> bool:
    """Return True for ASCII text, like headers. MongoDB might refuse a propagator's other values."""
    if not isinstance(name, str) or not isinstance(value, str) or len(value) > _HEADER_CHARS_MAX:
        return False
    return _NAME.fullmatch(name) is not None and value.isascii() and value.isprintable()


@contextmanager
def _current(api: _Api, begin: Callable[[], Begun | None]) -> Iterator[None]:
    """
    Make a trace context current in the block, then end its span. Raises nothing, and catches no error of
    the block.
    """
    context, span = _guard(begin, None) or (None, None)
    token = None
    try:
        if context is not None:
            token = _guard(lambda: api.context.attach(context), None)
        yield
    except BaseException as error:
        if span is not None:
            _guard(partial(_note_error, api, span, error), None)
        raise
    finally:
        try:
            if span is not None:
                _guard(span.end, None)
        finally:
            if token is not None:
                _guard(lambda: api.context.detach(token), None)


def _note_error(api: _Api, span: Any, error: BaseException) -> None:
    """Record the error of a block in its span. A task's own decision is not an error. For a retry, record its cause."""
    if not span.is_recording():
        return
    span.set_attribute("mongo_celery.ended_by", type(error).__name__)
    cause = error.exc if isinstance(error, Retry) else error
    if isinstance(cause, BaseException) and not isinstance(cause, Ignore):
        span.add_event("exception", _exception(cause))
    if not isinstance(error, _DECISIONS):
        span.set_status(api.trace.Status(api.trace.StatusCode.ERROR, error_text(error)))
        span.set_attribute("error.type", type(error).__qualname__)


def continue_trace(request: Any) -> AbstractContextManager[None]:
    """
    Continue the trace of a message, unless its task already has a span.

    Args:
        request: the worker's request. Only the propagator's headers are read.
    """
    api = _api()
    if api is None:
        return nullcontext()

    def begin() -> Begun | None:
        if api.trace.get_current_span().get_span_context().is_valid:
            return None
        found = {name: request.get(name) for name in api.fields()}
        carried = {name: value for name, value in found.items() if _is_header(name, value)}
        # A listener sends no baggage, so someone else put it into the message.
        span = api.trace.get_current_span(api.propagate.extract(carried, api.context.Context()))
        return (api.trace.set_span_in_context(span), None) if span.get_span_context().is_valid else None

    return _current(api, begin)


def sending(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """
    Open the span for publishing a task in the block. The message carries `trace_headers`.

    Args:
        name: name of the span, from a small set.
        attributes: the attributes of the span, in OpenTelemetry's conventions for messaging.
    """
    return _span(f"send {name}", attributes, lambda api: _sender(api, is_task=True))


def sending_for(context: Headers, name: str, attributes: Attributes, *, is_task: bool) -> AbstractContextManager[None]:
    """
    Do the same as `sending`, in the trace of the message's writer, linked to the current span.

    Args:
        context: the writer's result of `trace_to_store`. Without one, the message belongs to no trace.
        is_task: True if Celery publishes it.
    """
    return _span(f"send {name}", attributes, lambda api: _sender(api, is_task=is_task), context)


def processing(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """Open the span for a handler's work on a change, like `sending`."""
    return _span(f"process {name}", attributes, lambda api: _receiver(api, api.trace.SpanKind.CONSUMER))


def committing(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """Open the span for a commit, like `sending`."""
    return _span(f"commit {name}", attributes, lambda api: _receiver(api, api.trace.SpanKind.CLIENT))


def _span(
    name: str, attributes: Attributes, choose_kind: Callable[[_Api], Any], written: Headers | None = None
) -> AbstractContextManager[None]:
    """Open a child span of the current one. With `written`, a child of that context, linked to the current one."""
    api = _api()
    if api is None or (not written and _is_unheard(api)):
        return nullcontext()

    def begin() -> Begun:
        within, links = None, []
        if written is not None:
            within = api.propagate.extract(dict(written), api.context.Context())
            here = api.trace.get_current_span().get_span_context()
            there = api.trace.get_current_span(within).get_span_context()
            links = [api.trace.Link(here)] if here.is_valid and here.trace_id != there.trace_id else []
        nothing: Mapping[str, Any] = {}
        given = {"messaging.system": "celery", **_guard(attributes, nothing)}
        span = api.tracer.start_span(name, within, choose_kind(api), given, links)
        return api.trace.set_span_in_context(span, within), span

    return _current(api, begin)


def _is_unheard(api: _Api) -> bool:
    """Return True if no SDK would keep a span, and no trace is in progress. Many users have only the API."""

    def is_unheard() -> bool:
        is_without_sdk = isinstance(api.trace.get_tracer_provider(), api.trace.ProxyTracerProvider)
        return is_without_sdk and not api.trace.get_current_span().get_span_context().is_valid

    return _guard(is_unheard, otherwise=False)


def is_heard(request: Any = None) -> bool:
    """
    Return True if a new span may be kept, or if the current work belongs to a trace.

    Args:
        request: the worker's request, which may carry a trace.
    """
    api = _api()
    if api is None or not _is_unheard(api):
        return api is not None
    names: Collection[str] = _guard(api.fields, frozenset[str]())
    return request is not None and any(map(request.get, names))


def _receiver(api: _Api, kind: Any) -> Any:
    current = api.trace.get_current_span().get_span_context()
    return kind if current.is_remote or not current.is_valid else api.trace.SpanKind.INTERNAL


def _sender(api: _Api, *, is_task: bool) -> Any:
    kinds = api.trace.SpanKind
    return kinds.INTERNAL if is_task and _is_celery_instrumented() else kinds.PRODUCER


def _is_celery_instrumented() -> bool:
    module = sys.modules.get(_CELERY_INSTRUMENTATION)
    return module is not None and bool(module.CeleryInstrumentor().is_instrumented_by_opentelemetry)


def _exception(error: BaseException) -> dict[str, str]:
    """Return an error's attributes in OpenTelemetry's conventions, without credentials from driver messages."""
    return {
        "exception.type": type(error).__qualname__,
        "exception.message": error_text(error).removeprefix(f"{type(error).__name__}: "),
        "exception.stacktrace": traceback_text(error),
    }
