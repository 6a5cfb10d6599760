"""
The messages of a signature or canvas. All ids are chosen before storing, so each dispatch sends the same ones.

A single task is frozen here. For a chain or group, Celery's sending is captured: the messages have their ids, and a
chain's first step includes the others. A chord queries the result backend when it is sent, so it cannot be stored:
start it in a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from celery import Celery, current_task
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import dumps, prepare_accept_content

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.capture import IS_MESSAGE, capture_sends, install
from mongo_celery.outbox.stored_id import STORED_ID, derive_id, make_argument, mentions_stored_id, substitute

_SHOWN_CHARS = 200
_LINKS = ("link", "link_error", "chain")
_IDS = ("task_id", "root_id", "parent_id", "group_id")
_INVOLVED = {*_LINKS, "chord", "countdown", "eta", "expires"}
"""Options that make a single task more than its arguments."""


ELSEWHERE = "elsewhere"
"""The mark of a message with the names of tasks that its sender does not know, such as those of another app."""


class _Messages(list[Signature]):
    """The captured messages of Celery."""

    gives_results = False

    def __init__(self) -> None:
        self.ids: set[Any] = set()

    def take(self, signature: Signature) -> None:
        self.append(signature)


def freeze_messages(app: Celery, given: object, now: datetime, first_id: str) -> list[Signature]:
    """
    Return the messages of a signature or canvas, with every id fixed and relative times absolute.

    Only messages published at dispatch get an absolute `countdown` and `expires`. Those of later steps count from their
    sending by a worker, as without an outbox.

    Args:
        app: the Celery app.
        given: a signature, chain or group, or the dict of one.
        now: the time from which countdowns count.
        first_id: the task id of a single task that has none.

    Raises:
        OutboxRefusedError: it is not a canvas, is empty, a chord, or contains a change handler. Or Celery would run it
            immediately, because of `task_always_eager`.
    """
    signature, unknown = parse_signature(app, given), set[str]()
    for leaf in leaves(signature):
        task: Any = app.tasks.get(leaf["task"])
        if task is None:
            unknown.add(leaf["task"])
        if hasattr(task, "explain_refusal"):  # a change handler: its own `delay` reports the same
            raise OutboxRefusedError(task.explain_refusal(), task=leaf["task"])
    if IS_MESSAGE in signature or (signature.subtask_type is None and _INVOLVED.isdisjoint(signature.options)):
        options = {**signature.options, "task_id": signature.options.get("task_id") or first_id}
        plain: Any = {**signature, "options": options}
        if IS_MESSAGE in signature and unknown:
            plain[ELSEWHERE] = sorted(unknown)
        messages = [Signature(plain, app=app)]  # a clone costs more than everything else here
        _check_arguments(app, messages[0])
    else:
        messages = _capture_messages(app, signature)
    for message in messages:
        _make_absolute(message.options, now)
        _set_ancestors(message.options)
    return messages


def _capture_messages(app: Celery, signature: Signature) -> list[Signature]:
    """Send a canvas, and return the captured messages."""
    if app.conf.task_always_eager:
        raise OutboxRefusedError(
            f"{signature.task} cannot be stored. With task_always_eager, Celery would run it immediately, even "
            "if the write fails. Unset task_always_eager.",
            task=signature.task,
        )
    messages = _Messages()
    install(app)
    try:
        with capture_sends(app, messages):
            signature.clone().apply_async()  # later changes of its parts must not reach the user's canvas
    except (OutboxRefusedError, SoftTimeLimitExceeded):
        raise
    except Exception as error:
        raise OutboxRefusedError(
            f"{signature.task} cannot be stored, because Celery cannot send it: {short(error)}.", task=signature.task
        ) from error
    if not messages:
        raise OutboxRefusedError(
            f"{signature.task} contains no task. Give it at least one.",
            task=signature.task,
        )
    return messages


def parse_signature(app: Celery, given: object) -> Signature:
    """
    Return a signature or canvas, even from the dict of one.

    Raises:
        OutboxRefusedError: it is not a canvas.
    """
    if isinstance(given, Mapping) and not isinstance(given, Signature):
        given = Signature.from_dict(dict(given), app=app)
    if not isinstance(given, Signature):
        raise OutboxRefusedError(
            f"{type(given).__name__} is not a Celery signature. Pass task.s(...), or a chain or group of them."
        )
    return given


def find_ids(canvas: Any) -> set[str]:
    """Return the task ids of a canvas and its parts. Before sending these are the user's ids."""
    return {node["options"]["task_id"] for node in _nodes(canvas) if node["options"].get("task_id")}


def has_stored_id(canvas: Any) -> bool:
    """
    Return True if an argument of a task in this canvas is or contains `STORED_ID`.

    Raises:
        OutboxRefusedError: an argument contains itself.
    """
    try:
        return any(mentions_stored_id((leaf["args"], leaf["kwargs"])) for leaf in leaves(canvas))
    except RecursionError as error:
        raise OutboxRefusedError(
            f"{canvas['task']} cannot be stored: an argument contains itself, or is nested too deeply.",
            task=canvas["task"],
        ) from error


def substitute_id(canvas: Any, value: object) -> Any:
    """Return a frozen message with a value in place of `STORED_ID` in arguments."""
    for leaf in leaves(canvas):
        leaf["args"], leaf["kwargs"] = (substitute(leaf[name], STORED_ID, value) for name in ("args", "kwargs"))
    return canvas


def bind_message(canvas: dict[str, Any], bind: str, document_id: object) -> dict[str, Any]:
    """
    Bind a message, which was stored before its document was known, to one document.

    Args:
        canvas: the decoded canvas, which is not yet a signature. It is changed.
        bind: the entry's placeholder for the `_id`.
        document_id: `_id` of the document that contains the entry.

    Returns:
        The same canvas, with the `_id` in its arguments, and its own ids derived for this document.
    """
    nodes = list(_nodes(canvas))
    own = {node["options"].get("task_id") for node in nodes} - {None}
    argument = make_argument(document_id)
    for node in nodes:
        options = node["options"]
        options.update({name: derive_id(options[name], document_id) for name in _IDS if options.get(name) in own})
        if node.get("subtask_type") is None:
            node["args"], node["kwargs"] = (substitute(node[name], bind, argument) for name in ("args", "kwargs"))
    return canvas


def is_elsewhere(canvas: Mapping[str, Any]) -> bool:
    """Return True if the sender of a message did not know its task."""
    return canvas["task"] in canvas.get(ELSEWHERE, ())


def leaves(canvas: Any) -> Iterator[dict[str, Any]]:
    """Yield all single tasks of a canvas: members, bodies, later steps of a chain and links."""
    return (node for node in _nodes(canvas) if node.get("subtask_type") is None)


def _nodes(canvas: Any) -> Iterator[dict[str, Any]]:
    """Yield all parts of a canvas as their original dicts, so that changes affect the canvas."""
    if not isinstance(canvas, Mapping):
        raise OutboxRefusedError(f"A canvas contains {canvas!r}, which is not a signature. Pass task.s(...).")
    whole: Any = canvas
    yield whole
    parts: list[Any] = [whole["options"].get(name) for name in _LINKS]
    if whole.get("subtask_type") is not None:
        parts += [whole["kwargs"].get(name) for name in ("tasks", "header", "body")]
    for part in parts:
        for each in [part] if isinstance(part, Mapping) else part or ():
            yield from _nodes(each)


def _set_ancestors(options: dict[str, Any]) -> None:
    """Set root and parent as `delay()` would now. At dispatch Celery would name the sweep."""
    request = current_task.request if current_task else None
    if request is None or request.called_directly:
        options.setdefault("root_id", options["task_id"])
    else:
        options.setdefault("root_id", request.root_id or request.id)
        options.setdefault("parent_id", request.id)


def _make_absolute(options: dict[str, Any], now: datetime) -> None:
    countdown = options.pop("countdown", None)
    if countdown is not None:
        options["eta"] = now + timedelta(seconds=countdown)
    if isinstance(options.get("expires"), (int, float)):
        options["expires"] = now + timedelta(seconds=options["expires"])
    for name in ("eta", "expires"):  # as text, because not every serializer supports datetimes
        if isinstance(options.get(name), datetime):
            options[name] = options[name].isoformat()


def encode_message(app: Celery, message: Signature) -> tuple[str, str, Any]:
    """
    Return a frozen message in its tasks' serializer: content type, content encoding, payload.

    Raises:
        OutboxRefusedError: a task's serializer cannot encode its arguments.
    """
    tasks = list(leaves(message))
    serializers = [_serializer(app, leaf) for leaf in tasks]
    if len(tasks) > 1:
        for leaf, serializer in zip(tasks, serializers, strict=True):
            _encode((tuple(leaf["args"]), dict(leaf["kwargs"])), serializer, leaf["task"])
    whole = serializers[0] if len(set(serializers)) == 1 else str(app.conf.task_serializer)
    content_type, encoding, payload = _encode(dict(message), whole, str(message.task))
    if content_type not in (prepare_accept_content(app.conf.accept_content) or ()):
        raise OutboxRefusedError(
            f"{message.task} is encoded as {content_type}, which this app does not accept, so it could not be "
            "delivered. Add its serializer to accept_content.",
            task=message.task,
        )
    return content_type, encoding, payload


def show_arguments(canvas: Any) -> str:
    """Return the text that people see instead of a canvas's arguments."""
    given = canvas.options.get("argsrepr")
    text = str(given) if given is not None else repr(canvas)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _serializer(app: Celery, leaf: Mapping[str, Any]) -> str:
    task: Any = app.tasks.get(leaf["task"])
    return str(leaf["options"].get("serializer") or getattr(task, "serializer", None) or app.conf.task_serializer)


def _encode(value: object, serializer: str, task: str) -> tuple[str, str, Any]:
    try:
        content_type, encoding, payload = dumps(value, serializer=serializer)
    except Exception as error:
        raise OutboxRefusedError(
            f"{task} cannot be stored: serializer {serializer!r} cannot encode its arguments ({short(error)}). "
            "Pass plain values: an id instead of a document, and str(id) or STORED_ID instead of an ObjectId.",
            task=task,
        ) from error
    return content_type, encoding, payload


def _check_arguments(app: Celery, message: Signature) -> None:
    """Refuse arguments that do not fit the signature of a registered task, like `delay`."""
    task: Any = app.tasks.get(str(message.task))
    if task is None or not task.typing or not hasattr(task, "__header__"):
        return
    try:
        task.__header__(*message.args, **message.kwargs)
    except TypeError as error:
        raise OutboxRefusedError(
            f"{message.task} does not take these arguments: {short(error)}.", task=message.task
        ) from error
