"""
Freezing a canvas: every id in it is chosen before it is stored, so that each dispatch sends the same ids.

Giving a task id to `apply_async` is not enough: Celery prepares a chain anew at each call and names its steps
and the groups inside it afresh. So ids are written into every signature, and a chain is prepared once, here,
into what Celery itself sends: its first step with the others in the option `chain`
(`celery.canvas._chain.run`, 5.5 to 5.7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from celery import Celery, current_task
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from kombu.serialization import dumps, prepare_accept_content

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.redaction import short

_LINKS = ("link", "link_error")


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
    if isinstance(signature, Mapping) and not isinstance(signature, Signature):
        signature = Signature.from_dict(dict(signature), app=app)
    if not isinstance(signature, Signature):
        raise OutboxRefusedError(
            f"{type(signature).__name__} is no Celery signature; pass task.s(...), or a chain, group or chord of them."
        )
    copy = signature.clone()
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
    kind = signature.subtask_type
    if kind is None:
        yield signature
    for part in (*_parts(signature), *_linked(signature)):
        yield from leaves(part)


def encoded(app: Celery, signature: Any) -> tuple[str, str, Any]:
    """
    A frozen canvas in its tasks' own serializer: content type, content encoding, payload.

    Raises:
        OutboxRefusedError: arguments that the serializer of a task cannot encode, or that do not fit the
            signature of a registered task, as `delay` would refuse them.
    """
    serializers = []
    for leaf in leaves(signature):
        serializers.append(_serializer(app, leaf))
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


def _refuse_shape(app: Celery, signature: Any, *, top: bool) -> None:
    """Refuse what is empty, unknown, or would get new ids at each dispatch."""
    kind = signature.subtask_type
    if kind not in (None, "chain", "group", "chord"):
        raise OutboxRefusedError(
            f"a canvas of type {kind!r} cannot be stored; use task.s(...), chain, group or chord.",
        )
    if kind in {"chain", "group"}:
        signature.tasks = list(signature.tasks)  # a generator would be empty after it has been stored
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
    task = app.tasks.get(leaf.task)
    return str(leaf.options.get("serializer") or getattr(task, "serializer", None) or app.conf.task_serializer)


def _encode(value: object, serializer: str, task: str) -> tuple[str, str, Any]:
    try:
        content_type, encoding, payload = dumps(value, serializer=serializer)
    except Exception as error:
        raise OutboxRefusedError(
            f"{task} cannot be stored: serializer {serializer!r} cannot encode its arguments ({short(error)}). "
            "Pass plain values, such as an id instead of a document.",
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
