"""
A handler that a decorator registers. It is checked when the decorator runs.

Mistakes that would fail later are refused here, with a sentence that names the fix: options that would break the
protocol (`queue`, `expires`, `acks_late` ...), misspelt ones, generators, methods, duplicates and stacked decorators.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, TypedDict, cast

from celery import Celery, Task
from celery.local import Proxy
from celery.utils.time import rate

from mongo_celery.arguments import Duration, check_count, check_name, is_number, nearest
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.options import (
    COMMIT,
    LONGEST_BURST,
    POLICY,
    BridgeOptions,
    PartitionKey,
    Rule,
    StartFrom,
    check_duration,
    check_start,
)
from mongo_celery.bridge.partitioning import Partitioner, partitioner, rule_named
from mongo_celery.bridge.stream.filter import Filter, check_are_sent, make_filter
from mongo_celery.bridge.stream.source import Selector, parse_source
from mongo_celery.errors import ConfigurationError


class TaskOptions(TypedDict, total=False):
    """Options of Celery's task that a handler may have."""

    autoretry_for: tuple[type[BaseException], ...]
    base: Any
    bind: bool
    default_retry_delay: float
    dont_autoretry_for: tuple[type[BaseException], ...]
    max_retries: int | None
    rate_limit: str | float | None
    retry_backoff: bool | int
    retry_backoff_max: int
    retry_jitter: bool
    retry_kwargs: dict[str, Any]
    send_events: bool
    soft_time_limit: float | None
    throws: tuple[type[BaseException], ...]
    time_limit: float | None
    track_started: bool


class HandlerOptions(TaskOptions, total=False):
    """Keyword arguments of all decorators. `Bridge.on_change` explains them. This is their only list."""

    name: str | None
    operations: Iterable[str] | None
    fields: Iterable[str] | None
    match: Mapping[str, Any] | None
    partition_by: PartitionKey | None
    failure_policy: str | None
    transactional: bool
    group: str | None
    start_from: StartFrom | None
    commit: str | None
    coalesce: bool
    delay: Duration | None
    bookkeeping: bool
    max_running: int | None
    rate: str | float | None


TASK_OPTIONS = frozenset(TaskOptions.__annotations__)
_OWN_OPTIONS = frozenset(HandlerOptions.__annotations__) - TASK_OPTIONS
_OF_BRIDGE = frozenset(each.name for each in fields(BridgeOptions)) - TASK_OPTIONS - _OWN_OPTIONS
_QUEUE = "the bridge chooses the queue by the change's partition"
_REFUSED = {
    "batch_size": "on_change gives one change at a time. For lists use @bridge.on_changes(..., batch_size=...)",
    "queue": f"{_QUEUE}. To give a handler separate queues, use group='...'",
    **dict.fromkeys(("exchange", "routing_key"), _QUEUE),
    "priority": "a priority would reorder changes",
    **dict.fromkeys(("eta", "countdown"), "the listener sends changes in their order"),
    "expires": "an expired message would be dropped silently. Use failure_policy instead",
    "acks_late": "the bridge always acknowledges late",
    **dict.fromkeys(
        ("acks_on_failure", "acks_on_timeout", "acks_on_failure_or_timeout"),
        "MongoDB decides whether a change runs again, not the broker",
    ),
    "reject_on_worker_lost": "the listener sends the change again, in order",
    "ignore_result": "a change handler never stores a result",
    "serializer": "the bridge's messages are always JSON",
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


def _is_global_rate(value: Any) -> bool:
    return value is None or (_is_rate(value) and 0 < rate(value) < math.inf)


_EXCEPTIONS = _are_exceptions, "a tuple of exception classes, such as (ConnectionError,)"
_FLAG = (lambda value: isinstance(value, bool)), "True or False"
_LIMIT = (lambda value: value is None or (is_number(value) and value > 0)), "None or a number of seconds above 0"
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("autoretry_for", "dont_autoretry_for", "throws"), _EXCEPTIONS),
    **dict.fromkeys(("coalesce", "retry_jitter", "send_events", "track_started", "transactional"), _FLAG),
    **dict.fromkeys(("soft_time_limit", "time_limit"), _LIMIT),
    **dict.fromkeys(("default_retry_delay", "retry_backoff_max"), (_is_duration, "a number of seconds")),
    "max_retries": (
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
        "None or a whole number of at least 0",
    ),
    "max_running": (
        lambda value: value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1),
        "None, or a whole number of at least 1",
    ),
    "rate": (_is_global_rate, "None, or executions per period, above 0, such as '10/s', '100/m' or '1000/h'"),
    "rate_limit": (_is_rate, "None, or changes per period, such as '10/m'"),
    "retry_backoff": (
        lambda value: isinstance(value, bool) or _is_duration(value),
        "True, False or a number of seconds",
    ),
    "retry_kwargs": (lambda value: isinstance(value, Mapping), "a dictionary, such as {'max_retries': 5}"),
}
"""Celery does not check its own options. A wrong value would fail at the first retry and halt the partition."""


@dataclass(frozen=True, slots=True)
class Handler:
    """
    One registered handler.

    Attributes:
        name: its name, under which its positions are stored.
        task_name: the Celery task's name.
        targets: the sources as given. They are resolved when the listener starts, because models are loaded later.
        partition_by: the handler's partition rule. None for the bridge's.
        group: the group of workers that runs it. None for the bridge's own queues.
        start_from: the start without a position. None for the bridge's.
        commit: the way to write positions, `"chain"` or `"inline"`. None for the bridge's.
        batch_size: the largest number of changes in a list. None for a handler of single changes.
        coalesce: True if a run gives it only the last of several changes of one document.
        delay: seconds between a change and its run. None to run it immediately.
        max_running: the largest number of executions at a time, over all workers. None for no limit.
        rate: the largest number of executions per period, over all workers, in Celery's syntax. None for no limit.
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
    delay: float | None = None
    max_running: int | None = None
    rate: str | float | None = None

    @property
    def is_limited(self) -> bool:
        """Return True if it has a limit over all workers."""
        return self.max_running is not None or self.rate is not None

    @property
    def per_second(self) -> float:
        """Return its `rate` in executions per second. 0 without one."""
        return rate(cast("str", self.rate)) if self.rate is not None else 0.0

    @property
    def is_async(self) -> bool:
        """Return True if its function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def is_parted(self) -> bool:
        """Return True if one call of the handler may cover several changes of a run."""
        return self.batch_size is not None or self.coalesce

    def run_size(self, options: BridgeOptions, *, is_rate_limited: bool = False) -> int:
        """Return the largest number of changes in one of its runs. For a bulk handler, a list is a run."""
        if self.batch_size is not None:
            return self.batch_size
        return options.run_size if self.takes_runs(is_rate_limited=is_rate_limited) else 1

    def takes_runs(self, *, is_rate_limited: bool = False) -> bool:
        """
        Return True if `run_size` applies: the handler is called for each change, outside a transaction.

        It does not apply under a rate: users set it for changes, but Celery and the listener count messages.
        """
        is_rate_limited = is_rate_limited or self.rate is not None
        return self.batch_size is None and not self.transactional and not is_rate_limited

    @property
    def longest_delay(self) -> float:
        """Return the seconds for which `delay` may keep a change that has become the next one. 0 without a delay."""
        return (self.delay or 0.0) * (LONGEST_BURST if self.coalesce else 1)

    def selector(self, default_database: str | None) -> Selector:
        """Return sources and filter, with the sources resolved."""
        sources = tuple(parse_source(target, default_database) for target in self.targets)
        return Selector(self.name, sources, self.filter)

    def policy(self, options: BridgeOptions) -> str:
        """Return the failure policy of the handler, or by default of the bridge."""
        return self.failure_policy or options.failure_policy

    def commits_inline(self, options: BridgeOptions) -> bool:
        """Return True for `commit="inline"`, set for the handler or the bridge."""
        return (self.commit or options.commit) == "inline"

    def start(self, options: BridgeOptions) -> StartFrom:
        """Return where a handler without a position starts: its own `start_from`, or the bridge's."""
        return options.start_from if self.start_from is None else self.start_from

    def begins_with_snapshot(self, options: BridgeOptions) -> bool:
        """Return True if the handler begins with a snapshot when it has no position, and gets documents."""
        return self.start(options) == SNAPSHOT and self.filter.takes_documents

    def partitioner(self, options: BridgeOptions) -> Partitioner:
        """Return the rule that assigns this handler's changes to partitions."""
        return self._partitioner(self.partition_by if self.partition_by is not None else options.partition_by, options)

    def partitioner_named(self, name: str, options: BridgeOptions, handlers: Iterable[Handler]) -> Partitioner:
        """
        Return the rule of an earlier partitioning by its stored name.

        Args:
            handlers: all handlers of the bridge. Their functions, and the bridge's, are the only known ones.

        Raises:
            ConfigurationError: the rule is unknown, or could give another key with the present options.
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
        """Return True if both are the same definition, registered or loaded twice."""
        mine, theirs = inspect.unwrap(self.function), inspect.unwrap(other.function)
        if self.task_name != other.task_name or _find_source(mine) != _find_source(theirs):
            return False
        if mine.__code__ is not theirs.__code__:
            return True  # its module was loaded again
        is_closure = mine is not theirs and mine.__closure__
        names = {each.name for each in fields(self)} - {"function"}
        return not is_closure and all(getattr(self, name) == getattr(other, name) for name in names)

    def name_fix(self, known: Handler) -> str:
        """Return the advice in the error about a second handler of this name."""
        if _find_source(self.function) != _find_source(known.function):
            return "Give one of them another name with name='...'"
        return (
            f"It is defined twice, in {known.function.__module__} and {self.function.__module__}. Import its module by "
            "one name everywhere, and define it once, at module level or with @bridge.of(app).on_change(...). For "
            'several sources use one decorator, such as @bridge.on_change("shop.orders", "shop.invoices")'
        )


def _check_group(name: str, group: Any) -> str:
    """Refuse an invalid group, and a number, which looks like the index of a queue: `shop.3` has no group."""
    if check_name(group, name).isdigit():
        raise ConfigurationError(f"{name}={group!r} must not be a number, because queues have numbers. Use a word.")
    return str(group)


_RULES: Mapping[str, Rule] = {
    "failure_policy": POLICY,
    "commit": COMMIT,
    "group": _check_group,
    "start_from": check_start,
}
"""Rules of the options that may be None."""
_OF_FILTER = frozenset(each.name for each in fields(Filter))
_KEPT = (_OWN_OPTIONS & {each.name for each in fields(Handler)}) - {"name"}


def token_seconds(app: Celery, task_name: str) -> float:
    """Return the seconds between two runs of a rate-limited task in a worker. 0 without a limit."""
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
    Check a registration, and make the handler.

    Args:
        function: the decorated function.
        targets: the sources.
        options: the bridge's options. While they are unknown, None: then the checks that need them run later.
        task_name: name of the Celery task.
        given: the decorator's keyword arguments, including unchecked ones outside `HandlerOptions`.
        batch_size: the largest number of changes in a list. None for a handler of single changes.

    Raises:
        ConfigurationError: the first mistake, and its fix.
    """
    check_task_options(given)
    if given.get("rate") and given.get("rate_limit"):
        raise ConfigurationError(
            "rate and rate_limit cannot be combined: rate is for all workers together, rate_limit for each of them. "
            "Remove one of them.",
        )
    _check_batch(given, batch_size, options)
    if not targets:
        raise ConfigurationError("on_change needs at least one source, such as 'shop.orders'.")
    name = check_name(given.get("name") or function.__name__, "handler name")
    if given.get("delay") is not None:
        given = {**given, "delay": check_duration("delay", given["delay"])}
    handler = Handler(
        name=name,
        task_name=task_name,
        function=function,
        targets=targets,
        filter=make_filter(**{option: given[option] for option in _OF_FILTER & given.keys()}),
        batch_size=batch_size,
        **{option: given[option] for option in _KEPT & given.keys()},
    )
    for option, rule in _RULES.items():
        if given.get(option) is not None:
            rule(option, given[option])
    if handler.start_from == SNAPSHOT and not handler.filter.takes_documents:
        raise ConfigurationError(
            f"start_from='snapshot' gives handler {name} existing documents, but its operations lack insert, update "
            "and replace. Add one of them, or use start_from='oldest' or 'now'.",
        )
    if options is not None:
        handler.partitioner(options)
        check_are_sent(handler.filter.operations, expanded=options.show_expanded_events)
    for target in targets:
        if _is_complete(target):
            parse_source(target, None)
    return handler


def _check_batch(given: Mapping[str, Any], batch_size: int | None, options: BridgeOptions | None) -> None:
    """Refuse an invalid size, and `coalesce` for a handler that gets changes one by one."""
    if batch_size is not None:
        check_count("batch_size", batch_size)
        if given.get("coalesce") and batch_size == 1:
            raise ConfigurationError("coalesce=True has no effect together with batch_size=1. Use a larger batch_size.")
        return
    alone = [name for name in ("transactional", "rate_limit", "rate") if given.get(name)]
    if options is not None and options.run_size == 1:
        alone.append("run_size=1")
    if given.get("coalesce") and alone:
        raise ConfigurationError(
            f"coalesce=True has no effect together with {alone[0]}, because the handler then gets its changes one by "
            "one. Use @bridge.on_changes. Without transactional and a rate, Bridge(..., run_size=200) also works.",
        )


def _is_complete(target: object) -> bool:
    """
    Return True if a source can be checked now.

    A bare collection name needs the URL's database, and a model class needs its framework.
    """
    if isinstance(target, str):
        return "." in target or target == "*"
    return not isinstance(target, type)


_FUNCTIONS = (FunctionType, MethodType, partial, Proxy, Task)


def refuse_function_as_source(sources: Iterable[object], decorator: str) -> None:
    """
    Refuse a decorator without parentheses, which would take the function for a source and register nothing.

    Check only the type: a collection has every attribute, and a task's proxy may not be ready.
    """
    if any(issubclass(type(source), _FUNCTIONS) for source in sources):
        raise ConfigurationError(
            f"{decorator} needs a source, but got a function. Write "
            f'@bridge.{decorator}("db.collection") above the function.',
        )


def check_task_options(given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that are unknown, or that the bridge sets itself."""
    for option in given:
        if option in _REFUSED:
            raise ConfigurationError(f"option {option!r} cannot be set on a change handler: {_REFUSED[option]}.")
        if option in _OF_BRIDGE:
            raise ConfigurationError(
                f"option {option!r} belongs to the bridge, for all of its handlers. Use Bridge(..., {option}=...)."
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
    """Refuse a function that cannot be a handler."""
    if type(function) is Proxy or hasattr(function, "apply_async"):  # a proxy comes from a bridge without an app
        raise ConfigurationError(
            "on_change was applied to a Celery task. Apply it once to the plain function: on_change makes the task.",
        )
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError("a change handler cannot be a generator. Use def or async def, without yield.")
    if not inspect.isfunction(function):
        raise ConfigurationError(f"on_change needs a function, not {type(function).__name__}.")
    parameters = list(inspect.signature(function).parameters.values())
    if not bind and parameters and parameters[0].name == "self":
        raise ConfigurationError(
            "a change handler cannot be a method. Use a function. If it needs the task as `self`, set bind=True.",
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
        raise ConfigurationError("a change handler cannot be a lambda, because its task needs a name. Use def.")


def _find_source(function: Callable[..., Any]) -> tuple[str, int]:
    code: CodeType = inspect.unwrap(function).__code__
    return code.co_filename, code.co_firstlineno
