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
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded

from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.mongo.redaction import format_traceback, short

logger = logging.getLogger("mongo_celery.tracing")

T = TypeVar("T")
Headers = Mapping[str, str]
Attributes = Callable[[], Mapping[str, Any]]

STORED_BYTES_MAX = 1024
"""Of the trace context in one entry of an outbox: much baggage is left out before a document grows by it."""

_HEADER_CHARS_MAX = 8192
_MESSAGE_CHARS = 2000
_STACKTRACE_CHARS = 8000
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


class TraceScope:
    """
    A with-block in which a trace context is current. Behind it the one before is current again, whatever happened.

    It raises nothing of its own, and swallows nothing.

    Args:
        api: of OpenTelemetry; None for a block that does nothing.
        begin: gives the context, and the span that ends with the block; None for a block that does nothing.
    """

    def __init__(self, api: _Api | None = None, begin: Callable[[], tuple[Any, Any] | None] | None = None) -> None:
        self._api = api
        self._begin = begin
        self._token: Any = None
        self._span: Any = None

    def __enter__(self) -> Self:
        if self._api is not None and self._begin is not None:
            try:
                _guarded(lambda: self._enter(self._api), None)
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        span, self._span = self._span, None
        try:
            if span is not None:
                _guarded(lambda: self._note(span, error), None)
                _guarded(span.end, None)
        finally:
            self._leave()

    def _enter(self, api: Any) -> None:
        begun = None if self._begin is None else self._begin()
        if begun is not None:
            context, self._span = begun
            self._token = api.context.attach(context)

    def _leave(self) -> None:
        token, self._token = self._token, None
        if token is not None and self._api is not None:
            detach = self._api.context.detach
            _guarded(lambda: detach(token), None)

    def _note(self, span: Any, error: BaseException | None) -> None:
        """How it ended: a task's own decision is no error, and a retry has its cause."""
        if error is None or self._api is None or not span.is_recording():
            return
        span.set_attribute("mongo_celery.ended_by", type(error).__name__)
        cause = error.exc if isinstance(error, Retry) else error
        if isinstance(cause, BaseException) and not isinstance(cause, Ignore):
            span.add_event("exception", _exception(cause))
        if not isinstance(error, _DECISIONS):
            status = self._api.trace.Status(self._api.trace.StatusCode.ERROR, _text_of(error))
            span.set_status(status)
            span.set_attribute("error.type", type(error).__qualname__)


_NOTHING = TraceScope()


def received(request: Any) -> TraceScope:
    """
    Continue the trace that a message carries, unless somebody has begun a span for its task.

    Args:
        request: what a worker has made of the message; of its headers only those of the propagator are looked at.
    """
    api = _api()
    if api is None:
        return _NOTHING

    def begin() -> tuple[Any, Any] | None:
        if api.trace.get_current_span().get_span_context().is_valid:
            return None
        found = {name: request.get(name) for name in api.propagate.get_global_textmap().fields}
        carried = {name: value for name, value in found.items() if _is_header(name, value)}
        # A listener has no baggage, so what calls itself so was put into the message by somebody else.
        span = api.trace.get_current_span(api.propagate.extract(carried, api.context.Context()))
        return (api.trace.set_span_in_context(span), None) if span.get_span_context().is_valid else None

    return TraceScope(api, begin)


def sending(name: str, attributes: Attributes) -> TraceScope:
    """
    The span of a task that is published within the block, child of what is current; its message carries
    `trace_headers`.

    Args:
        name: what is sent, of few values.
        attributes: of the span, by OpenTelemetry's conventions for messaging.
    """
    api = _api()
    if api is None or _is_unheard(api):
        return _NOTHING
    return TraceScope(api, lambda: _begun(api, f"send {name}", _sender(api, is_task=True), attributes, None, ()))


def sending_for(context: Headers, name: str, attributes: Attributes, *, is_task: bool) -> TraceScope:
    """
    As `sending`, in the trace of whoever wrote the message; linked to what is current.

    Args:
        context: as `trace_to_store` gave it to the writer; a message without one is in nobody's trace.
        name: as of `sending`.
        attributes: as of `sending`.
        is_task: whether Celery publishes it.
    """
    api = _api()
    if api is None or (not context and _is_unheard(api)):
        return _NOTHING

    def begin() -> tuple[Any, Any]:
        written = api.propagate.extract(dict(context), api.context.Context())
        here = api.trace.get_current_span().get_span_context()
        there = api.trace.get_current_span(written).get_span_context()
        links = [api.trace.Link(here)] if here.is_valid and here.trace_id != there.trace_id else []
        return _begun(api, f"send {name}", _sender(api, is_task=is_task), attributes, written, links)

    return TraceScope(api, begin)


def processing(name: str, attributes: Attributes) -> TraceScope:
    """The span of what a handler does with a change; see `sending`."""
    return _of_receiver("process", name, attributes, "CONSUMER")


def committing(name: str, attributes: Attributes) -> TraceScope:
    """The span of a commit; see `sending`."""
    return _of_receiver("commit", name, attributes, "CLIENT")


def _of_receiver(verb: str, name: str, attributes: Attributes, kind: str) -> TraceScope:
    api = _api()
    if api is None or _is_unheard(api):
        return _NOTHING

    def begin() -> tuple[Any, Any]:
        current = api.trace.get_current_span().get_span_context()
        is_ours = current.is_remote or not current.is_valid
        chosen = getattr(api.trace.SpanKind, kind) if is_ours else api.trace.SpanKind.INTERNAL
        return _begun(api, f"{verb} {name}", chosen, attributes, None, ())

    return TraceScope(api, begin)


def _is_unheard(api: _Api) -> bool:
    """Whether a span would be nobody's: no SDK keeps it, and it continues no trace. Many have the API alone."""

    def is_unheard() -> bool:
        if not isinstance(api.trace.get_tracer_provider(), api.trace.ProxyTracerProvider):
            return False
        return not api.trace.get_current_span().get_span_context().is_valid

    return _guarded(is_unheard, otherwise=False)


def _begun(api: _Api, name: str, kind: Any, attributes: Attributes, within: Any, links: Any) -> tuple[Any, Any]:
    nothing: Mapping[str, Any] = {}
    given = {"messaging.system": "celery", **_guarded(attributes, nothing)}
    span = api.tracer.start_span(name, within, kind, given, links)
    return api.trace.set_span_in_context(span, within), span


def _sender(api: _Api, *, is_task: bool) -> Any:
    kinds = api.trace.SpanKind
    return kinds.INTERNAL if is_task and _is_celery_instrumented() else kinds.PRODUCER


def _is_celery_instrumented() -> bool:
    module = sys.modules.get(_CELERY_INSTRUMENTATION)
    return module is not None and bool(module.CeleryInstrumentor().is_instrumented_by_opentelemetry)


def _exception(error: BaseException) -> dict[str, str]:
    """By OpenTelemetry's conventions, and without the credentials that drivers' words may hold."""
    try:
        lines = str(format_traceback(error))
    except Exception:  # noqa: BLE001 - a user's __str__ or __notes__
        lines = ""
    return {
        "exception.type": type(error).__qualname__,
        "exception.message": _text_of(error),
        "exception.stacktrace": _plain(lines[-_STACKTRACE_CHARS:]),
    }


def _text_of(error: BaseException) -> str:
    try:
        return _plain(short(error)[:_MESSAGE_CHARS])
    except Exception:  # noqa: BLE001 - a user's __str__
        return ""


def _plain(text: str) -> str:
    """Without lone surrogates, which exporters refuse."""
    return text.encode("utf-8", "replace").decode()
