"""
Traces by OpenTelemetry: what belongs together across processes, and across the time that it waits in MongoDB.

::

    listener   send shop/summarise        (producer)   its context: headers of the message, and of the link behind it
    worker       process shop/summarise   (consumer)   one for each change of the run
    worker       commit shop/summarise    (client)

    writer     whatever writes through an outbox       its context: stored in the entry
    relay        send shop.tasks.ship     (producer)   child of the write, linked to where it is published

The API is imported here only, when it is first needed. Without it, or where no SDK and nobody else has begun a trace,
nothing is sent and nothing is stored. Which formats travel (W3C `traceparent` by default) is the global propagator's
matter, what is kept of spans the SDK's.

Whatever `opentelemetry-instrumentation-celery` traces has spans of its own for message and task, with the same
headers. Where it is active ours are internal: around its producer span, and inside its consumer span.

A trace context has no power: it is not signed, and whatever a header or a stored value holds, at worst a span has no
parent, or somebody else's. An error of a tracer, a propagator or an exporter ends here, with one log record.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded

from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import storable, traceback_text

logger = logging.getLogger("mongo_celery.tracing")

T = TypeVar("T")
Headers = Mapping[str, str]
Attributes = Callable[[], Mapping[str, Any]]
Begun = tuple[Any, Any]
"""A trace context, and the span that ends with its block; None for no span of ours."""

STORED_BYTES_MAX = 1024
"""Of the trace context in one entry of an outbox: much baggage is left out before a document grows by it."""

_HEADER_CHARS_MAX = 8192
_MESSAGE_CHARS = 2000
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REPORTS_MAX = 16
_CELERY_INSTRUMENTATION = "opentelemetry.instrumentation.celery"
_DECISIONS = (Ignore, Retry, StaleFencingTokenError)
"""Ways in which a task ends without having failed: repeated later, or left to a newer execution."""

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
    return _Api(context, propagate, trace, trace.get_tracer("mongo_celery", _own_version()))


def _own_version() -> str | None:
    try:
        return version("mongo-celery")
    except PackageNotFoundError:  # run from a directory
        return None


def _report(error: BaseException) -> None:
    """Said once for each kind: an exporter may fail for each span."""
    kind = type(error).__qualname__
    if kind not in _reported and len(_reported) < _REPORTS_MAX:
        _reported.add(kind)
        logger.warning(
            "tracing failed, and nothing else: %s: %s", kind, _text_of(error), extra={"event": "tracing_failed"}
        )


def _guarded(call: Callable[[], T], otherwise: T) -> T:
    try:
        return call()
    except SoftTimeLimitExceeded:  # of the handler, whose time this is
        raise
    except Exception as error:  # noqa: BLE001 - of a tracer, a propagator, a processor or an exporter
        _report(error)
        return otherwise


def trace_headers() -> dict[str, str]:
    """The current trace context as headers of a message; empty where there is none."""
    api = _api()
    if api is None:
        return {}
    found: dict[str, str] = {}
    _guarded(lambda: api.propagate.inject(found), None)
    return {name: value for name, value in found.items() if _is_header(name, value)}


def trace_to_store() -> dict[str, str]:
    """The same within `STORED_BYTES_MAX`: what would pass it is left out, and the trace itself comes first."""
    kept, room = dict[str, str](), STORED_BYTES_MAX
    for name, value in trace_headers().items():
        if len(name) + len(value) <= room:
            kept[name] = value
            room -= len(name) + len(value)
    return kept


def stored_trace(value: object) -> dict[str, str]:
    """A trace context as it was stored, without what cannot be part of one: anybody can have written there."""
    if not isinstance(value, Mapping):
        return {}
    return {name: text for name, text in value.items() if _is_header(name, text)}


def _is_header(name: object, value: object) -> bool:
    """ASCII, as headers are: what else a propagator gives might be something that MongoDB refuses."""
    if not isinstance(name, str) or not isinstance(value, str) or len(value) > _HEADER_CHARS_MAX:
        return False
    return _NAME.fullmatch(name) is not None and value.isascii() and value.isprintable()


@contextmanager
def _current(api: _Api, begin: Callable[[], Begun | None]) -> Iterator[None]:
    """Make a trace context current for the block, and end its span. It raises nothing, and swallows nothing."""
    context, span = _guarded(begin, None) or (None, None)
    token = None
    try:
        if context is not None:
            token = _guarded(lambda: api.context.attach(context), None)
        yield
    except BaseException as error:
        if span is not None:
            _guarded(partial(_note_error, api, span, error), None)
        raise
    finally:
        try:
            if span is not None:
                _guarded(span.end, None)
        finally:
            if token is not None:
                _guarded(lambda: api.context.detach(token), None)


def _note_error(api: _Api, span: Any, error: BaseException) -> None:
    """Record how a block ended. A task's own decision is no error, and a retry has its cause."""
    if not span.is_recording():
        return
    span.set_attribute("mongo_celery.ended_by", type(error).__name__)
    cause = error.exc if isinstance(error, Retry) else error
    if isinstance(cause, BaseException) and not isinstance(cause, Ignore):
        span.add_event("exception", _exception(cause))
    if not isinstance(error, _DECISIONS):
        span.set_status(api.trace.Status(api.trace.StatusCode.ERROR, _text_of(error)))
        span.set_attribute("error.type", type(error).__qualname__)


def received(request: Any) -> AbstractContextManager[None]:
    """
    Continue the trace that a message carries, unless somebody has begun a span for its task.

    Args:
        request: what a worker has made of the message. Of its headers only those of the propagator are read.
    """
    api = _api()
    if api is None:
        return nullcontext()

    def begin() -> Begun | None:
        if api.trace.get_current_span().get_span_context().is_valid:
            return None
        found = {name: request.get(name) for name in api.fields()}
        carried = {name: value for name, value in found.items() if _is_header(name, value)}
        # A listener has no baggage, so what calls itself so was put into the message by somebody else.
        span = api.trace.get_current_span(api.propagate.extract(carried, api.context.Context()))
        return (api.trace.set_span_in_context(span), None) if span.get_span_context().is_valid else None

    return _current(api, begin)


def sending(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """
    Open the span of a task that is published within the block. Its message carries `trace_headers`.

    Args:
        name: what is sent, of few values.
        attributes: of the span, by OpenTelemetry's conventions for messaging.
    """
    return _span(f"send {name}", attributes, lambda api: _sender(api, is_task=True))


def sending_for(context: Headers, name: str, attributes: Attributes, *, is_task: bool) -> AbstractContextManager[None]:
    """
    Do as `sending`, in the trace of whoever wrote the message, linked to what is current.

    Args:
        context: as `trace_to_store` gave it to the writer. A message without one is in nobody's trace.
        is_task: whether Celery publishes it.
    """
    return _span(f"send {name}", attributes, lambda api: _sender(api, is_task=is_task), context)


def processing(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """Open the span of a handler's work on a change. See `sending`."""
    return _span(f"process {name}", attributes, lambda api: _receiver(api, api.trace.SpanKind.CONSUMER))


def committing(name: str, attributes: Attributes) -> AbstractContextManager[None]:
    """Open the span of a commit. See `sending`."""
    return _span(f"commit {name}", attributes, lambda api: _receiver(api, api.trace.SpanKind.CLIENT))


def _span(
    name: str, attributes: Attributes, choose_kind: Callable[[_Api], Any], written: Headers | None = None
) -> AbstractContextManager[None]:
    """Open a span: a child of what is current, or, if `written` is given, of that context and linked to it."""
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
        given = {"messaging.system": "celery", **_guarded(attributes, nothing)}
        span = api.tracer.start_span(name, within, choose_kind(api), given, links)
        return api.trace.set_span_in_context(span, within), span

    return _current(api, begin)


def _is_unheard(api: _Api) -> bool:
    """Return True if no SDK keeps a span, and it continues no trace. Many have the API alone."""
    try:
        if not isinstance(api.trace.get_tracer_provider(), api.trace.ProxyTracerProvider):
            return False
        return not api.trace.get_current_span().get_span_context().is_valid
    except SoftTimeLimitExceeded:  # of the handler, whose time this is
        raise
    except Exception as error:  # noqa: BLE001 - as `_guarded`
        _report(error)
        return False


def is_heard(request: Any = None) -> bool:
    """
    Return True if somebody may keep a span that begins now, or what is done now belongs to a trace.

    Args:
        request: what a worker has made of a message, which may carry a trace.
    """
    api = _api()
    if api is None or not _is_unheard(api):
        return api is not None
    names: Collection[str] = _guarded(api.fields, frozenset[str]())
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
    """Return the attributes of OpenTelemetry's conventions, without credentials that drivers' words may hold."""
    return {
        "exception.type": type(error).__qualname__,
        "exception.message": _text_of(error),
        "exception.stacktrace": traceback_text(error),
    }


def _text_of(error: BaseException) -> str:
    try:
        return storable(short(error)[:_MESSAGE_CHARS])
    except Exception:  # noqa: BLE001 - a user's __str__
        return ""
