"""
A handler, as a decorator registers it, checked when the decorator runs.

Everything that can be known to fail later is refused here, with a sentence that names the fix: options
that would break the protocol (`queue`, `expires`, `acks_late` ...), misspelt ones, coroutine functions,
methods, duplicates and stacked decorators.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from types import CodeType
from typing import Any, cast

from celery import Celery, Task
from celery.local import Proxy
from celery.utils.time import rate

from mongo_celery.arguments import check_choice, check_count, check_flags, check_name, is_number, nearest
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.options import (
    CHOICES,
    BridgeOptions,
    PartitionKey,
    StartFrom,
    check_start,
)
from mongo_celery.bridge.partitioning import Partitioner, partitioner, rule_named
from mongo_celery.bridge.signatures import HandlerOptions, TaskOptions
from mongo_celery.bridge.stream.filter import Filter, check_are_sent, make_filter
from mongo_celery.bridge.stream.source import Selector, parse_source
from mongo_celery.errors import ConfigurationError

TASK_OPTIONS = frozenset(TaskOptions.__annotations__)
_OWN_OPTIONS = frozenset(HandlerOptions.__annotations__) - TASK_OPTIONS
_OF_BRIDGE = frozenset(each.name for each in fields(BridgeOptions)) - TASK_OPTIONS - _OWN_OPTIONS
_REFUSED = {
    "batch_size": "it is given one change at a time; write @bridge.on_changes(..., batch_size=...) for lists of them",
    "queue": "the bridge chooses the queue of the change's partition; group='...' gives a handler queues of its own",
    "exchange": "the bridge chooses the queue of the change's partition",
    "routing_key": "the bridge chooses the queue of the change's partition",
    "priority": "a priority would reorder changes",
    "eta": "the listener dispatches a change when its turn comes",
    "countdown": "the listener dispatches a change when its turn comes",
    "expires": "an expired message would be dropped silently; the failure policy decides instead",
    "acks_late": "the bridge needs late acknowledgement",
    "acks_on_failure": "the claim in MongoDB decides, not the broker",
    "acks_on_timeout": "the claim in MongoDB decides, not the broker",
    "acks_on_failure_or_timeout": "the claim in MongoDB decides, not the broker",
    "reject_on_worker_lost": "the listener dispatches again, sooner and in order",
    "ignore_result": "a chain has no result",
    "serializer": "the envelope is JSON and carries exact BSON",
    "compression": "set task_compression for the whole app instead",
}


def _are_exceptions(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(
        isinstance(each, type) and issubclass(each, BaseException) for each in value
    )


def _is_duration(value: object) -> bool:
    return is_number(value) and value >= 0


def _is_rate(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and rate(cast("str", value)) >= 0
    except (AttributeError, KeyError, TypeError, ValueError):
        return False


_EXCEPTIONS = _are_exceptions, "a tuple of exception classes, such as (ConnectionError,)"
_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_LIMIT = (lambda value: value is None or (is_number(value) and value > 0)), "None or a number of seconds above 0"
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("autoretry_for", "dont_autoretry_for", "throws"), _EXCEPTIONS),
    **dict.fromkeys(("retry_jitter", "send_events", "track_started"), _FLAG),
    **dict.fromkeys(("soft_time_limit", "time_limit"), _LIMIT),
    **dict.fromkeys(("default_retry_delay", "retry_backoff_max"), (_is_duration, "a number of seconds")),
    "max_retries": (
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
        "None or a whole number of at least 0",
    ),
    "rate_limit": (_is_rate, "None, or a number of changes in a time, such as '10/m'"),
    "retry_backoff": (
        lambda value: isinstance(value, bool) or _is_duration(value),
        "True, False or a number of seconds",
    ),
    "retry_kwargs": (lambda value: isinstance(value, Mapping), "a dictionary, such as {'max_retries': 5}"),
}
"""Celery checks none of them: a wrong value fails at the first retry, and halts the partition."""


@dataclass(frozen=True, slots=True)
class Handler:
    """
    One registered handler.

    Attributes:
        name: the subscription's name.
        task_name: the Celery task's name.
        targets: the sources as given; resolved when the listener starts, since models come later.
        partition_by: the handler's own rule, or None for the bridge's.
        group: of workers, whose queues its runs go to; None for the bridge's own queues.
        start_from: where it begins while it has no position; None for the bridge's.
        commit: who writes its positions, `"chain"` or `"inline"`; None for the bridge's.
        batch_size: most changes of one list; None for a handler of single changes.
        coalesce: whether it is given only the last of several changes of one document that are there together.
    """

    name: str
    task_name: str
    function: Callable[..., Any]
    targets: tuple[object, ...]
    filter: Filter
    partition_by: PartitionKey | None = None
    failure_policy: str | None = None
    transactional: bool = False
    group: str | None = None
    start_from: StartFrom | None = None
    commit: str | None = None
    batch_size: int | None = None
    coalesce: bool = False

    @property
    def is_parted(self) -> bool:
        """Return True if it does not simply get the next change of a run."""
        return self.batch_size is not None or self.coalesce

    def run_size(self, options: BridgeOptions, *, is_rate_limited: bool = False) -> int:
        """Most changes of one of its runs; a list is a run."""
        if self.batch_size is not None:
            return self.batch_size
        return options.run_size if self.takes_runs(is_rate_limited=is_rate_limited) else 1

    def takes_runs(self, *, is_rate_limited: bool = False) -> bool:
        """
        Return True if `run_size` counts: the handler is called for each change, in no transaction.

        Nor under a rate limit, which users set for changes: Celery counts messages.
        """
        return self.batch_size is None and not self.transactional and not is_rate_limited

    def selector(self, default_database: str | None) -> Selector:
        """Sources and filter, with the sources resolved."""
        sources = tuple(parse_source(target, default_database) for target in self.targets)
        return Selector(self.name, sources, self.filter)

    def policy(self, options: BridgeOptions) -> str:
        """Return the policy after the last attempt: the handler's own, or the bridge's."""
        return self.failure_policy or options.failure_policy

    def commits_inline(self, options: BridgeOptions) -> bool:
        """Return True if its executions write the position themselves: by its own option, or the bridge's."""
        return (self.commit or options.commit) == "inline"

    def start(self, options: BridgeOptions) -> StartFrom:
        """Return the start of a handler without a position: its own, or the bridge's."""
        return options.start_from if self.start_from is None else self.start_from

    def begins_with_snapshot(self, options: BridgeOptions) -> bool:
        """Return True if it begins with a snapshot while it has no position, and asks for documents at all."""
        return self.start(options) == SNAPSHOT and self.filter.takes_documents

    def partitioner(self, options: BridgeOptions) -> Partitioner:
        """The rule by which this subscription's changes are spread."""
        return self._partitioner(self.partition_by if self.partition_by is not None else options.partition_by, options)

    def partitioner_named(self, name: str, options: BridgeOptions, handlers: Iterable[Handler]) -> Partitioner:
        """
        Return the rule by which changes were spread under another option, by the name that is stored.

        Args:
            handlers: all of the bridge; of functions only theirs, and the bridge's own, are known.

        Raises:
            ConfigurationError: the rule is not among them, or might give another key with the present options.
        """
        registered = (options.partition_by, *(each.partition_by for each in handlers))
        return self._partitioner(rule_named(name, registered), options)

    def _partitioner(self, rule: PartitionKey | None, options: BridgeOptions) -> Partitioner:
        return partitioner(
            rule,
            options.full_document,
            options.full_document_before_change,
            self.filter.operations,
        )

    def is_same(self, other: Handler) -> bool:
        """Return True if both are one definition that was registered, or whose module was loaded, twice."""
        mine, theirs = inspect.unwrap(self.function), inspect.unwrap(other.function)
        if self.task_name != other.task_name or _place(mine) != _place(theirs):
            return False
        if mine.__code__ is not theirs.__code__:
            return True  # of a module that was loaded again
        is_closure = mine is not theirs and mine.__closure__
        names = {each.name for each in fields(self)} - {"function"}
        return not is_closure and all(getattr(self, name) == getattr(other, name) for name in names)

    def name_fix(self, known: Handler) -> str:
        """Return the fix for another handler of this name, in an error's words."""
        if _place(self.function) != _place(known.function):
            return "give one of them another name with name='...'"
        return (
            f"import its module by one name everywhere (now {known.function.__module__} and "
            f"{self.function.__module__}), and define it once, at module level or with @bridge.of(app).on_change(...); "
            "for several sources write one decorator, such as "
            '@bridge.on_change("shop.orders", "shop.invoices")'
        )


_OF_FILTER = frozenset(each.name for each in fields(Filter))
_KEPT = (_OWN_OPTIONS & {each.name for each in fields(Handler)}) - {"name"}


def token_seconds(app: Celery, task_name: str) -> float:
    """Return how long a worker waits between two runs of a task with a rate limit; 0 without one."""
    limit: Any = getattr(app.tasks.get(task_name), "rate_limit", None)
    per_second = rate(limit) if limit else 0.0
    return 1 / per_second if per_second > 0 else 0.0


def make_handler(
    function: Callable[..., Any],
    targets: tuple[object, ...],
    options: BridgeOptions | None,
    *,
    task_name: str,
    given: Mapping[str, Any],
    batch_size: int | None = None,
) -> Handler:
    """
    Check a registration, and make its handler.

    Args:
        function: below the decorator.
        targets: the sources.
        options: the bridge's options; None while they are unknown. Checks that need them come later.
        task_name: name of the Celery task.
        given: the decorator's keyword arguments, those of `HandlerOptions` and unchecked others.
        batch_size: most changes of one list; None for a handler of single changes.

    Raises:
        ConfigurationError: the first mistake, and its fix.
    """
    check_flags(**{name: given.get(name, False) for name in ("coalesce", "transactional")})
    _check_batch(given, batch_size, options)
    check_task_options(given)
    if not targets:
        raise ConfigurationError("on_change needs at least one source, such as 'shop.orders'.")
    name = check_name(given.get("name") or function.__name__, "handler name")
    handler = Handler(
        name=name,
        task_name=task_name,
        function=function,
        targets=targets,
        filter=make_filter(**{option: given[option] for option in _OF_FILTER & given.keys()}),
        batch_size=batch_size,
        **{option: given[option] for option in _KEPT & given.keys()},
    )
    for option in ("failure_policy", "commit"):
        if given.get(option) is not None:
            check_choice(option, given[option], CHOICES[option])
    _check_group(handler.group)
    if handler.start_from is not None:
        check_start(handler.start_from)
    if handler.start_from == SNAPSHOT and not handler.filter.takes_documents:
        raise ConfigurationError(
            f"start_from='snapshot' gives handler {name} the documents that exist, and it asks for none of insert, "
            "update and replace; choose 'oldest' or 'now', or add them to its operations.",
        )
    if options is not None:
        handler.partitioner(options)
        check_are_sent(handler.filter.operations, expanded=options.show_expanded_events)
    for target in targets:
        if _is_complete(target):
            parse_source(target, None)
    return handler


def _check_batch(given: Mapping[str, Any], batch_size: int | None, options: BridgeOptions | None) -> None:
    """Refuse a size that is none, and `coalesce` for a handler that gets its changes one by one."""
    if batch_size is not None:
        check_count("batch_size", batch_size)
    elif not given.get("coalesce"):
        return
    elif given.get("transactional"):
        raise ConfigurationError(
            "coalesce=True does nothing beside transactional=True, which gives on_change its changes one by one; "
            "write @bridge.on_changes, whose lists are one transaction each.",
        )
    elif options is not None and options.run_size == 1:
        raise ConfigurationError(
            "coalesce=True does nothing in runs of one change, which run_size=1 makes: write Bridge(..., "
            "run_size=200), or @bridge.on_changes.",
        )
    elif given.get("rate_limit"):
        raise ConfigurationError(
            "coalesce=True does nothing beside a rate_limit, for which on_change sends its changes one by one; write "
            "@bridge.on_changes, whose lists count as one call each.",
        )


def _check_group(group: str | None) -> None:
    """Refuse a number too, which could be taken for the index of a queue: `shop.3` has no group."""
    if group is not None and check_name(group, "group").isdigit():
        raise ConfigurationError(f"group {group!r} must not be a number, which names a queue; give it a word.")


def _is_complete(target: object) -> bool:
    """
    Return True if a source can be checked now.

    A bare collection waits for the URL's database, and a model class for its framework.
    """
    if isinstance(target, str):
        return "." in target or target == "*"
    return not isinstance(target, type)


def refuse_function_as_source(sources: Iterable[object], decorator: str) -> None:
    """
    A decorator without parentheses takes the function for a source, and would register nothing.

    Judged by the type alone: a collection has every attribute, and a task's proxy may not be ready to be asked.
    A model is a class, and PyMongo's collections, and those that others derive of them, are callable only to say that
    they are not.
    """
    for source in sources:
        kind = type(source)
        of_pymongo = any(each.__module__.startswith("pymongo.") for each in kind.__mro__)
        if callable(source) and not issubclass(kind, type) and not of_pymongo:
            written = decorator if decorator.startswith("shared") else f"bridge.{decorator}"
            raise ConfigurationError(
                f"{decorator} was given a function, and needs a source: write "
                f'@{written}("db.collection") above the function.',
            )


def check_task_options(given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that are unknown or that the bridge decides."""
    for option in given:
        if option in _REFUSED:
            raise ConfigurationError(f"option {option!r} cannot be set on a change handler: {_REFUSED[option]}.")
        if option in _OF_BRIDGE:
            raise ConfigurationError(
                f"option {option!r} is one of the bridge, for all of its handlers: write Bridge(..., {option}=...)."
            )
        if option not in HandlerOptions.__annotations__:
            known = list(HandlerOptions.__annotations__)
            raise ConfigurationError(f"option {option!r} of on_change is unknown{nearest(option, known)}.")
    base = given.get("base")
    if base is not None and not (isinstance(base, type) and issubclass(base, Task)):
        raise ConfigurationError(f"base={base!r} must be a class that derives from celery.Task.")
    for option, (is_right, wanted) in _VALUES.items():
        if option in given and not is_right(given[option]):
            raise ConfigurationError(f"{option}={given[option]!r} must be {wanted}.")


def check_function(function: object, *, bind: bool, given: str = "the change") -> None:
    """Refuse what cannot be a handler."""
    if _is_task(function):
        raise ConfigurationError(
            "on_change stands on a Celery task; put it on the plain function, once: it makes the task itself.",
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError("a change handler must be a plain function; Celery does not await coroutines.")
    if inspect.isgeneratorfunction(function):
        raise ConfigurationError("a change handler must be a plain function; nobody runs what a generator yields.")
    if not inspect.isfunction(function):
        raise ConfigurationError(f"on_change needs a function, not {type(function).__name__}.")
    parameters = list(inspect.signature(function).parameters.values())
    if not bind and parameters and parameters[0].name == "self":
        raise ConfigurationError(
            "a change handler cannot be a method; use a function, with bind=True if it needs the task as `self`.",
        )
    wanted = 2 if bind else 1
    try:
        inspect.signature(function).bind(*range(wanted))
    except TypeError:
        text = f"the task and {given}" if bind else given
        raise ConfigurationError(
            f"handler {function.__name__} must take {wanted} argument{'s' * (wanted > 1)}: {text}.",
        ) from None
    if not function.__name__.isidentifier():
        raise ConfigurationError("a change handler must be defined with def: Celery cannot make a task of a lambda.")


def _is_task(function: object) -> bool:
    """Return True for a task, and for what a bridge without an app gives in its place."""
    return type(function) is Proxy or hasattr(function, "apply_async")


def _place(function: Callable[..., Any]) -> tuple[str, int]:
    code: CodeType = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno
