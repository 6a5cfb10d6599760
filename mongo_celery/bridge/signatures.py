"""The options of the decorators, and the types of what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, overload

from mongo_celery.bridge.change import Change, Changes
from mongo_celery.bridge.options import PartitionKey, StartFrom

if TYPE_CHECKING:
    from celery import Celery

Given_contra = TypeVar("Given_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


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
    """Keyword arguments of all decorators, as `Bridge.on_change` explains them. No other list of them exists."""

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
    bookkeeping: bool


class HandlerTask(Protocol[Given_contra, Result_co]):
    """
    The task that `on_change` and `on_changes` return: it is called as the function is.

    With `bind=True` it is called without `self`. The listener dispatches it: `delay` raises.
    """

    @property
    def name(self) -> str:
        """Of the Celery task."""

    @property
    def app(self) -> Celery:
        """The Celery app."""

    @property
    def max_retries(self) -> int | None:
        """After which the failure policy decides."""

    @property
    def request(self) -> Any:
        """Celery's, inside the handler."""

    def retry(self, *, exc: BaseException | None = ..., countdown: float | None = ..., **options: Any) -> Any:
        """Celery's, inside the handler: it always raises."""

    def __call__(self, given: Given_contra, /) -> Result_co:
        """Run the function, as a unit test does."""


class OnChange(Protocol):
    """The decorator of a handler of single changes, which has its task as first argument where it has `bind=True`."""

    @overload
    def __call__(self, function: Callable[[Change], Result], /) -> HandlerTask[Change, Result]: ...

    @overload
    def __call__(self, function: Callable[[Any, Change], Result], /) -> HandlerTask[Change, Result]: ...


class OnChanges(Protocol):
    """The decorator of a bulk handler."""

    @overload
    def __call__(self, function: Callable[[Changes], Result], /) -> HandlerTask[Sequence[Change], Result]: ...

    @overload
    def __call__(self, function: Callable[[Any, Changes], Result], /) -> HandlerTask[Sequence[Change], Result]: ...


Single = TypeVar("Single", bound=Callable[[Change], Any] | Callable[[Any, Change], Any])
"""The function of a shared handler, which stays what it is."""

Bulk = TypeVar("Bulk", bound=Callable[[Changes], Any] | Callable[[Any, Changes], Any])
