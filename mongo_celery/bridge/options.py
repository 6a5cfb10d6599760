"""
The options of a bridge: one frozen value, validated when it is made.

An option comes from the `Bridge(...)` call, then from the Celery setting `mongo_celery_<option>`, then from the
defaults here. Durations are seconds or `timedelta`. Every wait and buffer has a named bound. This module checks
relations between times, so that each heartbeat can come in time:

- a lease is renewed every `lease_ttl / 3`, and each of our calls takes at most `call_timeout(ttl)`, less than a third,
  so that one renewal may fail;
- the same holds for a claim and its heartbeat.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from bson import Timestamp

from mongo_celery.arguments import check_choice, check_count, check_flag, check_known, check_name, seconds
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import DEFAULT_DATABASE
from mongo_celery.mongo.table import call_timeout

SETTING_PREFIX = "mongo_celery_"
_QUEUES = 4  # a worker's work for one message grows with the number of its queues
_DAY = 86_400
LONGEST_BURST = 10
"""Delays after the first change of a burst, after which it is handled although its key is not quiet."""
SPLIT_BURST = 2
"""Delays after the first change of a partition, after which quiet keys need not be in one run."""

_TOKEN_DATA = re.compile(r"82(?:[0-9A-Fa-f]{2}){8,}")  # a key string that begins with a Timestamp

PartitionKey = str | Callable[[Mapping[str, Any]], Any]
StartFrom = str | Timestamp | datetime | Mapping[str, Any]
Rule = Callable[[str, Any], Any]
"""Given an option's name and value, return the final value or raise ConfigurationError."""


def one_of(*choices: object) -> Rule:
    """Return the rule of an option with a fixed set of values."""
    return partial(check_choice, choices=choices)


def check_duration(name: str, value: Any) -> float:
    """
    Return a duration in seconds.

    Raises:
        ConfigurationError: it is not above 0, or it is longer than a day.
    """
    found = seconds(value, name)
    if not 0 < found <= _DAY:
        raise ConfigurationError(f"{name}={found} must be more than 0 seconds and at most {_DAY} seconds, a day.")
    return found


def _check_ttl(name: str, value: Any) -> float:
    if check_duration(name, value) < 1:
        raise ConfigurationError(f"{name}={value} must be at least 1 second.")
    return seconds(value, name)


def _check_database(name: str, value: Any) -> Any:
    if not isinstance(value, str) or value in {"", "admin", "config", "local"} or re.search(r'[/\\. "$\0]', value):
        raise ConfigurationError(
            f"{name}={value!r} cannot be the state database. Use a plain name such as 'mongo_celery', but not "
            "'admin', 'config' or 'local'."
        )
    return value


def _check_comment(name: str, value: Any) -> Any:
    if not isinstance(value, str | Mapping):
        raise ConfigurationError(f"{name}={value!r} must be a string or a document, such as 'shop'.")
    return value


def check_start(name: str, value: Any) -> Any:
    """
    Check the start of a bridge or a handler, and return it.

    Raises:
        ConfigurationError: it is not a valid start.
    """
    if isinstance(value, str):
        check_choice(name, value, ("oldest", "now", "snapshot"))
    elif isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigurationError(f"{name}={value!r} has no time zone. Add one, such as tzinfo=timezone.utc.")
    elif isinstance(value, Mapping):
        data = value.get("_data")
        if not isinstance(data, str) or not _TOKEN_DATA.fullmatch(data):
            raise ConfigurationError(
                f"{name}={dict(value)!r} is not a resume token. Pass a whole one, such as {{'_data': '82...'}}. "
                "change.resume_token has it.",
            )
    elif not isinstance(value, Timestamp):
        raise ConfigurationError(
            f"{name}={value!r} must be 'oldest', 'now', 'snapshot', a bson Timestamp, a datetime or a resume token.",
        )
    return value


POLICY = one_of("halt", "dead_letter", "park_key", "skip", "discard")
COMMIT = one_of("chain", "inline")


def _option(default: Any, rule: Rule) -> Any:
    """Return the field of an option. None is valid if it is the default."""
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """
    The options of one bridge, explained in docs/configuration.md.

    Raises:
        ConfigurationError: a value, or a relation between values, cannot work. The message names the option and the
            fix.
    """

    name: str = _option("default", lambda _name, value: check_name(value, "bridge name"))
    database: str = _option(DEFAULT_DATABASE, _check_database)
    partitions: int = _option(16, check_count)
    queues: int | None = _option(None, check_count)
    partition_by: PartitionKey | None = None
    run_size: int = _option(1, check_count)
    run_seconds: float = _option(1.0, check_duration)
    run_bytes: int = _option(1 << 20, check_count)
    lease_ttl: float = _option(10.0, _check_ttl)
    claim_ttl: float = _option(10.0, _check_ttl)
    start_from: StartFrom = _option("oldest", check_start)  # noqa: RUF009 - a field, as the others
    full_document: str | None = _option(
        "updateLookup", one_of(None, "default", "updateLookup", "whenAvailable", "required")
    )
    full_document_before_change: str | None = _option(None, one_of("off", "whenAvailable", "required"))
    show_expanded_events: bool = _option(False, check_flag)
    failure_policy: str = _option("halt", POLICY)
    commit: str = _option("chain", COMMIT)
    on_history_lost: str = _option("halt", one_of("halt", "oldest", "now"))
    max_crashes: int = _option(3, check_count)
    transaction_seconds: float = _option(30.0, check_duration)
    commit_grace: float = _option(3.0, check_duration)
    dispatch_grace: float | None = _option(None, check_duration)
    buffer_bytes: int = _option(64 << 20, check_count)
    spill_bytes: int = _option(8 << 30, check_count)
    spill_after: float = _option(5.0, check_duration)
    max_message_bytes: int = _option(512 << 10, check_count)
    comment: str | Mapping[str, Any] | None = _option(None, _check_comment)
    start_timeout: float = _option(60.0, check_duration)
    autodiscover: bool = _option(True, check_flag)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            rule, value = each.metadata.get("rule"), getattr(self, each.name)
            if rule is not None and (value is not None or each.default is not None):
                object.__setattr__(self, each.name, rule(each.name, value))
        self._check_relations()

    @property
    def grace(self) -> float:
        """Seconds after which the listener dispatches an unclaimed run again."""
        return max(5.0, self.claim_ttl * 2 / 3) if self.dispatch_grace is None else self.dispatch_grace

    @property
    def queue_count(self) -> int:
        """Number of queues that the partitions share, in each group."""
        return self.queues or min(self.partitions, _QUEUES)

    def queue_name(self, index: int, group: str | None = None) -> str:
        """Return the queue of a partition index in a group, or without one. A larger index wraps around."""
        of_group = self.name if group is None else f"{self.name}.{group}"
        return f"{of_group}.{index % self.queue_count}"

    def queue_names(self, group: str | None = None) -> list[str]:
        """Return the names of all queues of a group, or without a group."""
        return [self.queue_name(index, group) for index in range(self.queue_count)]

    def _check_relations(self) -> None:
        """Check options against each other. An error names its options, because settings may still be missing."""
        if self.queues is not None and self.queues > self.partitions:
            raise ConfigurationError(
                f"queues={self.queues} is more than partitions={self.partitions}. Lower queues, or raise partitions.",
                options=("queues", "partitions"),
            )
        least = self.claim_ttl / 3 + call_timeout(self.claim_ttl)
        if self.grace < least:
            raise ConfigurationError(
                f"dispatch_grace={self.dispatch_grace} must be at least {least:.1f} s, because "
                f"claim_ttl={self.claim_ttl}. Raise dispatch_grace, or lower claim_ttl.",
                options=("dispatch_grace", "claim_ttl"),
            )


OPTION_NAMES = tuple(field.name for field in dataclasses.fields(BridgeOptions))


def merge_options(given: Mapping[str, Any], settings: Mapping[str, Any]) -> BridgeOptions:
    """
    Return the options of one bridge. Keyword arguments override Celery settings.

    Args:
        given: keyword arguments of `Bridge(...)`.
        settings: settings whose names begin with `mongo_celery_`, without that prefix.
    """
    check_known(list(given), OPTION_NAMES, "option")
    below = {name: value for name, value in settings.items() if name != "database_url"}
    if "name" in below:
        raise ConfigurationError(
            "the setting mongo_celery_name cannot be used, because a bridge needs its name before Celery reads "
            "settings. Use Bridge(name='...').",
        )
    return BridgeOptions(**{**below, **given})


def early(given: Mapping[str, Any]) -> BridgeOptions | None:
    """
    Check a bridge's keyword arguments before the app's settings are known.

    Returns:
        The options without settings. None if given options can fit together only with the settings.

    Raises:
        ConfigurationError: a value, or a relation between given values, cannot work.
    """
    try:
        return merge_options(given, {})
    except ConfigurationError as error:
        if set(getattr(error, "options", given)) <= set(given):
            raise
        return None
