"""
Freezing a canvas: every id in it is chosen before it is stored, so that each dispatch sends the same ids.

Giving a task id to `apply_async` is not enough: Celery prepares a chain anew at each call and names its steps
and the groups inside it afresh. So ids are written into every signature, and a chain is prepared once, here,
into what Celery itself sends: its first step with the others in the option `chain`
(`celery.canvas._chain.run`, 5.5 to 5.7).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from celery import Celery, current_task
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from celery.result import ResultBase
from kombu.serialization import dumps, prepare_accept_content

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.stored_id import STORED_ID, as_argument, derived_id, mentions_stored_id, put_in

_LINKS = ("link", "link_error")
_IDS = ("task_id", "root_id", "parent_id", "group_id")
_INVOLVED = {*_LINKS, "chain", "chord", "countdown", "eta", "expires"}
"""Options with which a single task is more than its arguments."""


def frozen(app: Celery, signature: object, now: datetime, first_id: str) -> Signature:
    """
    A copy of a signature or canvas in which every id is fixed and relative times are absolute.

    Only what is published at dispatch has its `countdown` and `expires` made absolute; those of later steps
    count from the moment in which a worker sends them, as they do without an outbox.

    Args:
        app: the Celery app, for its clock and time zone.
        signature: a signature, chain, group or chord; a dict of one is accepted too.
        now: the time from which a countdown counts.
        first_id: the task id of a single task that has none.

    Raises:
        OutboxRefusedError: it is no canvas, an empty one, or one whose ids cannot be fixed.
    """
    signature = signature_of(app, signature)
    if _is_plain(signature):
        options = {**signature.options, "task_id": signature.options.get("task_id") or first_id}
        plain: Any = {**signature, "options": options}
        copy = Signature(plain, app=app)  # a clone costs more than all else here
        _set_ancestors(copy)
        return copy
    copy = signature.clone()
    _detach(copy)
    _refuse_shape(app, copy, top=True)
    if copy.subtask_type is None:
        copy.options.setdefault("task_id", first_id)
    _name_all(copy)
    if copy.subtask_type == "chain":
        copy = _prepared(app, copy)
    _make_absolute(copy, now)
    if copy.subtask_type is None:
        _set_ancestors(copy)
    return copy


def signature_of(app: Celery, given: object) -> Signature:
    """
    A signature or canvas, also of a dict of one.

    Raises:
        OutboxRefusedError: it is none.
    """
    if isinstance(given, Mapping) and not isinstance(given, Signature):
        given = Signature.from_dict(dict(given), app=app)
    if isinstance(given, ResultBase):
        raise OutboxRefusedError(
            "a function of the _id has sent its task itself, so the task goes without the write. Return a signature: "
            "lambda _id: send_receipt.s(_id)."
        )
    if not isinstance(given, Signature):
        raise OutboxRefusedError(
            f"{type(given).__name__} is no Celery signature; pass task.s(...), or a chain, group or chord of them."
        )
    return given


def _is_plain(signature: Signature) -> bool:
    """Whether it is a single task with nothing in its options that has to be looked at or made absolute."""
    return signature.subtask_type is None and type(signature) is Signature and _INVOLVED.isdisjoint(signature.options)


def ids_in(signature: Any) -> set[str]:
    """The ids of this canvas and of its parts: before it is frozen those that the user has given, afterwards all."""
    return {each.options["task_id"] for each in _signatures(signature) if each.options.get("task_id")}


def mentions_id(signature: Any) -> bool:
    """
    Whether an argument of a task of this canvas is `STORED_ID`, or has it in it.

    Raises:
        OutboxRefusedError: an argument contains itself.
    """
    try:
        return any(mentions_stored_id(leaf.args) or mentions_stored_id(leaf.kwargs) for leaf in leaves(signature))
    except RecursionError as error:
        raise OutboxRefusedError(
            f"{signature.task} cannot be stored: an argument contains itself, or is nested too deep.",
            task=signature.task,
        ) from error


def with_id(signature: Any, value: object) -> Any:
    """A frozen canvas with a value wherever `STORED_ID` stands among arguments."""
    for node in _nodes(signature):
        if node.get("subtask_type") is None:
            node["args"], node["kwargs"] = (put_in(node[name], STORED_ID, value) for name in ("args", "kwargs"))
    return signature


def bound(canvas: dict[str, Any], bind: str, document_id: object, keeps: Collection[str] = ()) -> dict[str, Any]:
    """
    A canvas that was stored before its document was known, made that of one document.

    Args:
        canvas: as it was decoded, before it becomes a signature; it is changed.
        bind: of the entry, the text that stands for the `_id`.
        document_id: `_id` of the document in which the entry was found.
        keeps: of the entry, the ids that stay as they are.

    Returns:
        The same: with the `_id` among its arguments, and each of its own ids derived for this document.
    """
    nodes = list(_nodes(canvas))
    own = {node["options"].get("task_id") for node in nodes} - {None, *keeps}
    argument = as_argument(document_id)
    for node in nodes:
        options = node["options"]
        options.update({name: derived_id(options[name], document_id) for name in _IDS if options.get(name) in own})
        if node.get("subtask_type") is None:
            node["args"], node["kwargs"] = (put_in(node[name], bind, argument) for name in ("args", "kwargs"))
    return canvas


def _nodes(canvas: Any) -> Iterator[dict[str, Any]]:
    """All parts of a canvas as the dicts that they are, so that what is changed in them is changed in the canvas."""
    yield canvas
    kind, kwargs, options = canvas.get("subtask_type"), canvas["kwargs"], canvas["options"]
    parts: list[Any] = [options.get(name) for name in (*_LINKS, "chain")]
    if kind is not None:
        parts += [kwargs.get(name) for name in ("tasks", "header", "body")]
    for part in parts:
        for each in [part] if isinstance(part, Mapping) else part or ():
            yield from _nodes(each)


def _set_ancestors(task: Any) -> None:
    """Root and parent as `delay()` would say them now; at dispatch Celery would name the sweep."""
    request = current_task.request if current_task else None
    if request is None or request.called_directly:
        task.options.setdefault("root_id", task.options["task_id"])
    else:
        task.options.setdefault("root_id", request.root_id or request.id)
        task.options.setdefault("parent_id", request.id)


def leaves(signature: Any) -> Iterator[Any]:
    """All single tasks of a canvas: members, bodies, later steps of a chain and links."""
    if _is_plain(signature):  # as nearly all are
        return iter((signature,))
    return (each for each in _signatures(signature) if each.subtask_type is None)


def _signatures(signature: Any) -> Iterator[Any]:
    """A canvas and all its parts, at any depth."""
    yield signature
    for part in (*_parts(signature), *_linked(signature)):
        yield from _signatures(part)


def encoded(app: Celery, signature: Any) -> tuple[str, str, Any]:
    """
    A frozen canvas in its tasks' own serializer: content type, content encoding, payload.

    Raises:
        OutboxRefusedError: arguments that the serializer of a task cannot encode, or that do not fit the
            signature of a registered task, as `delay` would refuse them; or a change handler.
    """
    serializers, tasks = [], list(leaves(signature))
    for leaf in tasks:
        serializers.append(_serializer(app, leaf))
        if len(tasks) > 1:
            _encode((tuple(leaf.args), dict(leaf.kwargs)), serializers[-1], leaf.task)
    for head in heads(signature):
        _check_arguments(app, head)
    whole = serializers[0] if len(set(serializers)) == 1 or signature.subtask_type is None else None
    content_type, encoding, payload = _encode(dict(signature), whole or str(app.conf.task_serializer), signature.task)
    if content_type not in (prepare_accept_content(app.conf.accept_content) or ()):
        raise OutboxRefusedError(
            f"{signature.task} is encoded as {content_type}, which this app does not accept: no relay could read it. "
            "Add its serializer to accept_content.",
            task=signature.task,
        )
    return content_type, encoding, payload


def representation(signature: Any, length: int) -> str:
    """What people see instead of arguments; never longer than `length` characters."""
    given = signature.options.get("argsrepr")
    text = str(given) if given is not None else repr(signature)
    return text if len(text) <= length else text[: length - 3] + "..."


def _parts(signature: Any) -> Sequence[Any]:
    kind = signature.subtask_type
    if kind in {"chain", "group"}:
        return list(signature.tasks)
    if kind == "chord":
        return [*_header(signature), signature.body]
    return ()


def _header(chord: Any) -> Sequence[Any]:
    return list(getattr(chord.tasks, "tasks", chord.tasks))


def _linked(signature: Any) -> Iterator[Any]:
    for option in (*_LINKS, "chain"):
        found = signature.options.get(option) or ()
        for link in [found] if isinstance(found, Mapping) else found:
            if isinstance(link, Mapping):
                yield _signature(link)


def _detach(signature: Any) -> None:
    """Give a clone parts of its own; Celery's shares those of a group, and their ids, with what it was cloned from."""
    if signature.subtask_type in {"chain", "group"}:
        signature.tasks = _cloned(signature.tasks)
    elif signature.subtask_type == "chord":
        header = signature.tasks
        if isinstance(header, Signature):
            signature.tasks = header.clone()
            signature.tasks.tasks = _cloned(_header(signature))
        else:
            signature.tasks = _cloned(header)
    for part in _parts(signature):
        if isinstance(part, Signature):
            _detach(part)


def _cloned(parts: Any) -> list[Any]:
    return [part.clone() if isinstance(part, Signature) else part for part in parts]


def _refuse_shape(app: Celery, signature: Any, *, top: bool) -> None:
    """Refuse what is empty, unknown, or would get new ids at each dispatch."""
    kind = signature.subtask_type
    if kind not in (None, "chain", "group", "chord"):
        raise OutboxRefusedError(
            f"a canvas of type {kind!r} cannot be stored; use task.s(...), chain, group or chord.",
        )
    parts = _parts(signature)
    if kind is not None and (not parts or any(part is None for part in parts)):
        raise OutboxRefusedError(f"an empty {kind} starts nothing; give it at least one task, and a chord its body.")
    if kind == "chord" and not _header(signature):
        raise OutboxRefusedError("a chord without a header starts nothing; give it at least one task.")
    if kind == "chord" and isinstance(app.backend, DisabledBackend):
        raise OutboxRefusedError("a chord needs a result backend, and this app has none: set result_backend.")
    if kind == "chain" and not top and any(part.subtask_type in ("group", "chord") for part in parts):
        raise OutboxRefusedError(
            "a chain with a group or chord in it, inside another group or chord, gets new ids at each dispatch; "
            "let a task start the inner part, or store the parts as entries of their own.",
        )
    for part in parts:
        _refuse_shape(app, part, top=False)


def _name_all(signature: Any) -> None:
    options = signature.options
    options.setdefault("task_id", str(uuid4()))
    for name in _LINKS:
        found = options.get(name)
        if found:
            options[name] = [_signature(link) for link in ([found] if isinstance(found, Mapping) else found)]
    for part in (*_parts(signature), *(link for name in _LINKS for link in options.get(name) or ())):
        _name_all(part)


def _signature(link: Any) -> Any:
    if not isinstance(link, Mapping):
        raise OutboxRefusedError(f"link={link!r} is no signature; pass task.s(...).")
    return link if isinstance(link, Signature) else Signature.from_dict(dict(link))


def _prepared(app: Celery, chain: Any) -> Any:
    """The first step of a chain with the others behind it, as Celery sends it."""
    options = dict(chain.options)
    steps, _ = chain.prepare_steps(chain.args, {}, chain.tasks, None, None, options.pop("link_error", None), app, None)
    for link in options.pop("link", None) or ():
        steps[0].link(link)
    first = steps.pop()
    options.pop("task_id", None)  # the last step has an id of its own
    first.options.update({name: value for name, value in options.items() if name not in first.options})
    for step in (first, *steps):
        _name_all(step)
    if steps:
        first.options["chain"] = [*steps, *(first.options.get("chain") or ())]
    return first


def heads(signature: Any) -> Iterator[Any]:
    """The tasks that are published at dispatch."""
    kind = signature.subtask_type
    if kind is None:
        yield signature
    elif kind == "chain":
        yield from heads(signature.tasks[0])
    elif kind == "group":
        for part in signature.tasks:
            yield from heads(part)
    else:
        for part in _header(signature):
            yield from heads(part)


def _make_absolute(signature: Any, now: datetime) -> None:
    holders = {id(each.options): each.options for each in (signature, *heads(signature))}
    for options in holders.values():
        countdown = options.pop("countdown", None)
        if countdown is not None:
            options["eta"] = now + timedelta(seconds=countdown)
        if isinstance(options.get("expires"), (int, float)):
            options["expires"] = now + timedelta(seconds=options["expires"])
        for name in ("eta", "expires"):  # as text: not every serializer knows datetimes
            if isinstance(options.get(name), datetime):
                options[name] = options[name].isoformat()


def _serializer(app: Celery, leaf: Any) -> str:
    task: Any = app.tasks.get(leaf.task)
    if hasattr(task, "explain_refusal"):  # a change handler: its own `delay` says the same
        raise OutboxRefusedError(task.explain_refusal(), task=leaf.task)
    return str(leaf.options.get("serializer") or getattr(task, "serializer", None) or app.conf.task_serializer)


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


def _check_arguments(app: Celery, head: Any) -> None:
    task: Any = app.tasks.get(head.task)
    if task is None or not task.typing or not hasattr(task, "__header__"):
        return
    try:
        task.__header__(*head.args, **head.kwargs)
    except TypeError as error:
        raise OutboxRefusedError(
            f"{head.task} does not take these arguments: {short(error)}.", task=head.task
        ) from error
