"""
The options of a bridge: one frozen value, validated when it is made.

An option comes from the `Bridge(...)` call, else from the Celery setting `mongo_celery_<option>`,
else from the defaults here. Durations are seconds or `timedelta`; every wait and buffer has a bound,
and the bound has a name. Relations between times are checked here, once, so that no part of the
protocol has to ask whether its heartbeat can come in time:

- a lease is renewed every `lease_ttl / 3` and one call of ours takes at most `call_timeout(ttl)`,
  less than a third, so that one renewal may fail;
- the same holds for a claim and its heartbeat.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import NoneType
from typing import Any

from bson import Timestamp

from mongo_celery.arguments import check_choice, check_count, check_flags, check_known, check_name, seconds
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.mongo.table import call_timeout

SETTING_PREFIX = "mongo_celery_"
_QUEUES = 4  # what a worker does for one message grows with the queues that it asks
_DAY = 86_400
_TOKEN_DATA = re.compile(r"82(?:[0-9A-Fa-f]{2}){8,}")  # a key string that begins with a Timestamp
_DURATIONS = (
    "run_seconds",
    "transaction_seconds",
    "lease_ttl",
    "claim_ttl",
    "commit_grace",
    "dispatch_grace",
    "start_timeout",
    "spill_after",
)

CHOICES: Mapping[str, Sequence[object]] = {
    "failure_policy": ("halt", "dead_letter", "park_key", "skip", "discard"),
    "commit": ("chain", "inline"),
    "on_history_lost": ("halt", "oldest", "now"),
    "full_document": (None, "default", "updateLookup", "whenAvailable", "required"),
    "full_document_before_change": (None, "off", "whenAvailable", "required"),
}

PartitionKey = str | Callable[[Mapping[str, Any]], Any]
StartFrom = str | Timestamp | datetime | Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """
    The options of one bridge; docs/configuration.md says what each option means.

    Raises:
        ConfigurationError: when a value or a relation between values cannot work; the message
            names the option and the fix.
    """

    name: str = "default"
    database: str = DEFAULT_DATABASE
    partitions: int = 16
    queues: int | None = None
    partition_by: PartitionKey | None = None
    run_size: int = 1
    run_seconds: float = 1.0
    run_bytes: int = 1 << 20
    lease_ttl: float = 10.0
    claim_ttl: float = 10.0
    start_from: StartFrom = "oldest"
    full_document: str | None = "updateLookup"
    full_document_before_change: str | None = None
    show_expanded_events: bool = False
    failure_policy: str = "halt"
    commit: str = "chain"
    on_history_lost: str = "halt"
    max_crashes: int = 3
    transaction_seconds: float = 30.0
    commit_grace: float = 3.0
    dispatch_grace: float | None = None
    buffer_bytes: int = 64 << 20
    spill_bytes: int = 8 << 30
    spill_after: float = 5.0
    max_message_bytes: int = 512 << 10
    batch_size: int | None = None
    comment: str | Mapping[str, Any] | None = None
    start_timeout: float = 60.0
    autodiscover: bool = True

    def __post_init__(self) -> None:
        if self.dispatch_grace is None:
            object.__setattr__(self, "dispatch_grace", max(5.0, seconds(self.claim_ttl, "claim_ttl") * 2 / 3))
        for field in _DURATIONS:
            object.__setattr__(self, field, seconds(getattr(self, field), field))
        self._check_names()
        self._check_counts()
        self._check_choices()
        self._check_times()
        self._check_relations()

    @property
    def grace(self) -> float:
        """Seconds after which a dispatched run that is not claimed is dispatched again."""
        assert self.dispatch_grace is not None
        return self.dispatch_grace

    @property
    def queue_count(self) -> int:
        """Number of queues that the partitions share, in each group."""
        return self.queues or min(self.partitions, _QUEUES)

    def queue_name(self, index: int, group: str | None = None) -> str:
        """Return the queue of a partition index in a group, or in none; an index beyond the queues wraps around."""
        of_group = self.name if group is None else f"{self.name}.{group}"
        return f"{of_group}.{index % self.queue_count}"

    def queue_names(self, group: str | None = None) -> list[str]:
        """Return the names of all queues of a group, or of none."""
        return [self.queue_name(index, group) for index in range(self.queue_count)]

    def _check_names(self) -> None:
        check_name(self.name, "bridge name")
        database = self.database
        if (
            not isinstance(database, str)
            or not database
            or database in {"admin", "config", "local"}
            or re.search(r'[/\\. "$\0]', database)
        ):
            raise ConfigurationError(
                f"database={database!r} cannot hold the state; use a plain name such as 'mongo_celery'."
            )

    def _check_counts(self) -> None:
        for field in (
            "partitions",
            "run_size",
            "run_bytes",
            "max_crashes",
            "buffer_bytes",
            "spill_bytes",
            "max_message_bytes",
        ):
            check_count(field, getattr(self, field))
        for field in ("queues", "batch_size"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"{field}={value!r} must be None or a whole number of at least 1.")

    def _check_choices(self) -> None:
        if self.on_history_lost == "snapshot":
            raise ConfigurationError(
                "on_history_lost='snapshot': run `celery -A APP changes snapshot start HANDLER` after a loss of "
                "history; choose 'oldest' or 'now' here.",
            )
        for field, choices in CHOICES.items():
            check_choice(field, getattr(self, field), choices)
        check_flags(show_expanded_events=self.show_expanded_events, autodiscover=self.autodiscover)
        if not isinstance(self.comment, (str, Mapping, NoneType)):
            raise ConfigurationError(f"comment={self.comment!r} must be a text or a document.")
        check_start(self.start_from)

    def _check_times(self) -> None:
        for field in ("lease_ttl", "claim_ttl"):
            if not 1 <= getattr(self, field) <= _DAY:
                raise ConfigurationError(f"{field}={getattr(self, field)} must lie between 1 second and one day.")
        for field in (name for name in _DURATIONS if name not in {"lease_ttl", "claim_ttl"}):
            if not 0 < getattr(self, field) <= _DAY:
                raise ConfigurationError(
                    f"{field}={getattr(self, field)} must be more than 0 seconds and at most a day."
                )

    def _check_relations(self) -> None:
        """Each error names its options as a fact: at construction a setting may still be missing."""
        if self.queues is not None and self.queues > self.partitions:
            raise ConfigurationError(
                f"queues={self.queues} is more than partitions={self.partitions}; lower it.",
                options=("queues", "partitions"),
            )
        least = self.claim_ttl / 3 + call_timeout(self.claim_ttl)
        if self.grace < least:
            raise ConfigurationError(
                f"dispatch_grace={self.dispatch_grace} must be at least {least:.1f} s, a heartbeat and a call of "
                f"claim_ttl={self.claim_ttl}; raise it or lower claim_ttl.",
                options=("dispatch_grace", "claim_ttl"),
            )


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(BridgeOptions))


def merge_options(given: Mapping[str, Any], settings: Mapping[str, Any]) -> BridgeOptions:
    """
    Return the options of one bridge from its keyword arguments and the Celery settings below them.

    Args:
        given: keyword arguments of `Bridge(...)`.
        settings: settings whose names begin with `mongo_celery_`, without that prefix.
    """
    check_known(list(given), OPTION_NAMES, "option")
    below = {name: value for name, value in settings.items() if name != "database_url"}
    if "name" in below:
        raise ConfigurationError(
            "setting mongo_celery_name comes too late, since a bridge needs its name before settings are read; use "
            "Bridge(name='...').",
        )
    return BridgeOptions(**{**below, **given})


def early(given: Mapping[str, Any]) -> BridgeOptions | None:
    """
    Check a bridge's keyword arguments before the app's settings are known.

    Returns:
        The options without settings; None when only the settings can tell whether two options fit together.

    Raises:
        ConfigurationError: a value, or a relation between given values, cannot work.
    """
    try:
        return merge_options(given, {})
    except ConfigurationError as error:
        if set(getattr(error, "options", given)) <= set(given):
            raise
        return None


def check_start(start_from: object) -> None:
    """
    Refuse what cannot be a start, of a bridge or of one handler.

    Raises:
        ConfigurationError: what would be one.
    """
    if isinstance(start_from, str):
        check_choice("start_from", start_from, ("oldest", "now", "snapshot"))
    elif isinstance(start_from, datetime):
        if start_from.tzinfo is None:
            raise ConfigurationError("start_from is a datetime without a time zone; add one, such as timezone.utc.")
    elif isinstance(start_from, Mapping):
        data = start_from.get("_data")
        if not isinstance(data, str) or not _TOKEN_DATA.fullmatch(data):
            raise ConfigurationError(
                f"start_from={dict(start_from)!r} is no resume token of a change stream; give one whole, as "
                "change.resume_token has it: {'_data': '82...'}.",
            )
    elif not isinstance(start_from, Timestamp):
        raise ConfigurationError(
            f"start_from={start_from!r} must be 'oldest', 'now', 'snapshot', a bson Timestamp, a datetime or a resume "
            "token.",
        )
