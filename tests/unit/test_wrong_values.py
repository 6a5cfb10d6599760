"""A value of the wrong kind is refused where it is given, by a sentence that names the option (P9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

import pytest
from celery import Celery

from mongo_celery import Bridge, Change, Outbox, TwoPhaseCommit, once, transactional
from mongo_celery.bridge.options import OPTION_NAMES
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.options import OutboxOptions

URL = "mongodb://localhost/shop?replicaSet=rs0"
NAN, INF = float("nan"), float("inf")
ODD = object()

NO_NUMBER = (NAN, INF, -INF, "3", b"1", True, ODD)
NO_COUNT = (NAN, 0, -1, 1.5, "3", True, ODD)
NO_NAMES: tuple[object, ...] = (5, "insert", b"insert", set(), [], {5}, ["insert", None])
NO_FLAG = ("no", 1, None, ODD)
NO_TEXT = (5, True, "", ODD)
NO_START: tuple[object, ...] = (
    *(5, "noww", None, NAN, ODD, {}, {"_data": 1}, {"_data": "82"}, {"_data": "826B02CA8B0000000G"}),
    *({"_id": {"_data": "82" + "0" * 20}}, datetime(2024, 1, 1)),  # noqa: DTZ001 - hours lie between its readings
)


def register(decorator: str) -> Callable[..., object]:
    def handle(changes: Change) -> None:
        """Do nothing."""

    def register_handler(**options: Any) -> None:
        getattr(Bridge(Celery("shop", set_as_current=False), URL), decorator)("shop.orders", **options)(handle)

    return register_handler


def nowhere() -> Any:
    raise AssertionError


Make = Callable[..., object]
MAKERS: dict[str, Make] = {
    "Bridge": lambda **options: Bridge(None, URL, **options),
    "on_change": register("on_change"),
    "on_changes": register("on_changes"),
    "Outbox": lambda **options: Outbox(Celery("shop", set_as_current=False), nowhere, **options),
    "TwoPhaseCommit": lambda **options: TwoPhaseCommit(None, nowhere, application="shop", **options),
    "transactional": lambda **options: transactional(nowhere, **options),
    "once": lambda **options: once(nowhere, **options),
}
NO_EXCEPTIONS = (ConnectionError, "ConnectionError", (ConnectionError, "x"), 5)
OF_TASKS: dict[str, Iterable[object]] = {
    "autoretry_for": NO_EXCEPTIONS,
    "dont_autoretry_for": NO_EXCEPTIONS,
    "throws": NO_EXCEPTIONS,
    "base": ("Task", ODD, object),
    "default_retry_delay": (*NO_NUMBER, None, -1),
    "max_retries": (NAN, INF, -1, 1.5, "3", True, ODD),
    "rate_limit": ("often", "10/x", True, ODD),
    "retry_backoff": (NAN, INF, -1, "3", None, ODD),
    "retry_backoff_max": (*NO_NUMBER, None, -1),
    "retry_jitter": NO_FLAG,
    "retry_kwargs": ("max_retries", 5, None),
    "send_events": NO_FLAG,
    "soft_time_limit": (*NO_NUMBER, 0),
    "time_limit": (*NO_NUMBER, 0),
    "track_started": NO_FLAG,
}
OF_HANDLERS: dict[str, Iterable[object]] = {
    "operations": NO_NAMES,
    "fields": NO_NAMES,
    "match": (5, "$x", [], True, {}, {"a": 1}),
    "partition_by": (5, True),
    "failure_policy": (5, "halted", ODD),
    "transactional": NO_FLAG,
    "group": (5, "", True, "slow.ones"),
    "start_from": [value for value in NO_START if value is not None],
    "commit": (5, "inlined", True),
    "coalesce": NO_FLAG,
    "delay": (*NO_NUMBER, 0, -1, 86_401),
    "bookkeeping": NO_FLAG,
    "name": (5, True, ODD, "a.b", "x" * 65),
    "max_running": (0, -1, 1.5, "4", True, ODD),
    "rate": ("often", "10/x", "0/m", 0, -1, NAN, INF, True, ODD),
}
WRONG: dict[str, dict[str, Iterable[object]]] = {
    "Bridge": {
        **dict.fromkeys(
            ("run_seconds", "transaction_seconds", "commit_grace", "start_timeout"),
            (*NO_NUMBER, None, 0, -1, 86_401),
        ),
        **dict.fromkeys(("lease_ttl", "claim_ttl"), (*NO_NUMBER, None, 0.9, 86_401)),
        **dict.fromkeys(("dispatch_grace", "spill_after"), (*NO_NUMBER, 0, -1, 86_401)),
        **dict.fromkeys(
            ("partitions", "run_size", "run_bytes", "max_crashes", "buffer_bytes", "spill_bytes", "max_message_bytes"),
            (*NO_COUNT, None),
        ),
        "queues": NO_COUNT,
        **dict.fromkeys(("show_expanded_events", "autodiscover"), NO_FLAG),
        **dict.fromkeys(("failure_policy", "commit", "on_history_lost"), (5, "x", None, ODD)),
        **dict.fromkeys(("full_document", "full_document_before_change"), (5, "x", True)),
        "name": (5, True, "", "a b", "a.b", "a/b", "x" * 65, "é", "a\n"),
        "database": (5, None, "", "admin", "config", "local", "a.b", "a/b", "a b", "a$b", 'a"b', "a\0b", "a\\b"),
        "start_from": NO_START,
        "comment": (5, True, ODD),
    },
    "on_change": {**OF_HANDLERS, **OF_TASKS},
    "on_changes": {"batch_size": NO_COUNT},
    "Outbox": {
        **dict.fromkeys(("sweep_after", "claim_ttl"), (*NO_NUMBER, None, 0)),
        "dead_letter_retention": (*NO_NUMBER, 0),
        "max_attempts": (*NO_COUNT, None),
        **dict.fromkeys(("database", "exchange"), (*NO_TEXT, None)),
        "name": NO_TEXT,
        "sweep_every": (*NO_NUMBER, 0),
        "at_once": ("no", 5, None),
        "failure_policy": (5, "x", None),
    },
    "TwoPhaseCommit": {
        **dict.fromkeys(("older_than", "timeout", "deadline"), (*NO_NUMBER, None, 0)),
        **dict.fromkeys(("recover_every", "retention"), (*NO_NUMBER, 0)),
        "name": (*NO_TEXT, None),
        "accounts": (5, "accounts"),
        "protocol": (5, "x", None),
    },
    "transactional": {
        "timeout": (*NO_NUMBER, 0),
        **dict.fromkeys(("independent", "durable"), NO_FLAG),
        "outbox": (5, "x"),
    },
    "once": {"keep": (*NO_NUMBER, None, 0), "claim_ttl": (*NO_NUMBER, None, 0), "key": (5, "x")},
}


@pytest.mark.parametrize(("maker", "option"), [(maker, option) for maker, of in WRONG.items() for option in of])
def test_a_wrong_value_is_refused_by_name(maker: str, option: str) -> None:
    """NaN is not below any bound, True is a number, and any text is true: each would work otherwise, or much later."""
    words = option.replace("_", "[_ ]")
    for value in WRONG[maker][option]:
        with pytest.raises(ConfigurationError, match=words):
            MAKERS[maker](**{option: value})


def test_no_option_is_left_out() -> None:
    """Who adds one to a bridge, an outbox or a handler says here what it may not be."""
    assert set(WRONG["Bridge"]) | {"partition_by"} == set(OPTION_NAMES)
    assert set(WRONG["Outbox"]) == set(OutboxOptions.__dataclass_fields__)
