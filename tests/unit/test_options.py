"""The options of a bridge: bounds, relations, names, settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery import Bridge
from mongo_celery.arguments import seconds
from mongo_celery.bridge.options import OPTION_NAMES, BridgeOptions, merge_options
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.table import call_timeout

DURATIONS = (
    "run_seconds",
    "transaction_seconds",
    "lease_ttl",
    "claim_ttl",
    "commit_grace",
    "dispatch_grace",
    "start_timeout",
)
COUNTS = ("partitions", "run_size", "run_bytes", "max_crashes", "buffer_bytes")


def make(**options: Any) -> BridgeOptions:
    return BridgeOptions(**options)


def celery_app(**settings: Any) -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False, **settings)


def settings_module(**settings: Any) -> ModuleType:
    module = ModuleType("settings")
    vars(module).update(settings)
    return module


def test_the_defaults_are_valid_and_finite() -> None:
    """Every wait and every buffer of a bridge without options has a bound."""
    options = make()
    for name in (*DURATIONS, *COUNTS):
        assert 0 < getattr(options, name) < float("inf")
    assert (options.partitions, options.run_size, options.lease_ttl, options.claim_ttl) == (16, 1, 10.0, 10.0)
    assert options.failure_policy == options.on_history_lost == "halt"


def test_options_cannot_be_changed_afterwards() -> None:
    """What was validated stays valid."""
    with pytest.raises(FrozenInstanceError):
        make().partitions = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True, None])
def test_a_count_is_a_whole_number_of_at_least_one(name: str, value: object) -> None:
    """A buffer of nothing or of half a change cannot work."""
    with pytest.raises(ConfigurationError, match=rf"{name}=.* whole number of at least 1"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["queues", "batch_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_an_optional_count_is_none_or_at_least_one(name: str, value: object) -> None:
    """None means that somebody else chooses."""
    assert getattr(make(**{name: None}), name) is None
    assert getattr(make(**{name: 2}), name) == 2
    with pytest.raises(ConfigurationError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", ["lease_ttl", "claim_ttl"])
@pytest.mark.parametrize("value", [0, 0.9, 86_401, -10, float("nan"), float("inf")])
def test_a_right_lasts_between_a_second_and_a_day(name: str, value: float) -> None:
    """A ttl shorter than a few round trips is lost at once; without an end it is no lease."""
    with pytest.raises(ConfigurationError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", sorted(set(DURATIONS) - {"lease_ttl", "claim_ttl"}))
@pytest.mark.parametrize("value", [0, -1, 86_401, float("nan"), float("inf")])
def test_every_other_duration_is_positive_and_bounded(name: str, value: float) -> None:
    """No wait lasts for ever."""
    with pytest.raises(ConfigurationError, match=name):
        make(**{name: value})


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_may_be_a_timedelta(name: str) -> None:
    """Both forms mean the same."""
    assert getattr(make(**{name: timedelta(seconds=20)}), name) == 20.0
    assert make(**{name: timedelta(seconds=20)}) == make(**{name: 20})


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", ["10", True, [], b"1"])
def test_a_duration_is_nothing_else(name: str, value: object) -> None:
    """`"10"` from an environment variable is refused where it is given."""
    with pytest.raises(ConfigurationError, match=rf"{name}=.* number of seconds or a timedelta"):
        make(**{name: value})


def test_seconds_are_floats() -> None:
    """Callers compute with them."""
    assert [seconds(value, "x") for value in (1, 1.5, timedelta(minutes=1))] == [1.0, 1.5, 60.0]


@given(st.floats(1, 86_400))
def test_one_call_and_one_heartbeat_fit_twice_into_a_right(ttl: float) -> None:
    """P6: with a beat every third and calls below a third, one beat may fail and the right still holds."""
    assert call_timeout(ttl) < ttl / 3
    assert ttl / 3 + 2 * call_timeout(ttl) < ttl


@given(st.floats(1, 86_400))
def test_the_grace_by_default_covers_a_heartbeat_and_a_call(ttl: float) -> None:
    """A run whose claim is alive but was not seen yet is not dispatched again."""
    options = make(claim_ttl=ttl)
    assert options.grace >= ttl / 3 + call_timeout(ttl)


def test_a_grace_shorter_than_a_heartbeat_and_a_call_is_refused() -> None:
    """P6: it would dispatch runs that are alive; the message names both options."""
    assert make(claim_ttl=30, dispatch_grace=19).grace == 19
    with pytest.raises(ConfigurationError, match=r"dispatch_grace=18\.9 .* 19\.0 s.* claim_ttl=30"):
        make(claim_ttl=30, dispatch_grace=18.9)


def test_there_are_never_more_queues_than_partitions() -> None:
    """A queue without a partition would wait for nothing."""
    assert make(partitions=4, queues=4).queue_count == 4
    with pytest.raises(ConfigurationError, match="queues=5 is more than partitions=4"):
        make(partitions=4, queues=5)


def test_partitions_share_the_queues_in_turn() -> None:
    """Every partition has one queue, every queue a partition; by default there are no more than four."""
    options = make(name="shop", partitions=5, queues=2)
    assert options.queue_names() == ["shop.0", "shop.1"]
    assert options.queue_names("slow") == ["shop.slow.0", "shop.slow.1"]
    assert [options.queue_name(index) for index in range(5)] == ["shop.0", "shop.1", "shop.0", "shop.1", "shop.0"]
    assert make(partitions=3).queue_names() == ["default.0", "default.1", "default.2"]
    assert make(partitions=16).queue_names() == ["default.0", "default.1", "default.2", "default.3"]
    assert make(partitions=16, queues=16).queue_count == 16


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/b", "x" * 65, "é", "a\n", None, 7])
def test_a_bridge_name_fits_into_queues_ids_and_task_ids(name: object) -> None:
    """`/` and `.` separate the parts of those, so they cannot be in a name."""
    assert make(name="Shop_1-x").name == "Shop_1-x"
    with pytest.raises(ConfigurationError, match="bridge name"):
        make(name=name)


@pytest.mark.parametrize("name", ["", "admin", "config", "local", "a.b", "a/b", "a b", "a$b", 'a"b', "a\0b", "a\\b"])
def test_the_state_database_has_a_name_that_mongodb_takes_and_does_not_own(name: str) -> None:
    """P9: refused here, not at the first write."""
    with pytest.raises(ConfigurationError, match="database="):
        make(database=name)


@pytest.mark.parametrize(
    ("name", "value", "suggestion"),
    [
        ("failure_policy", "dead-letter", "dead_letter"),
        ("on_history_lost", "oldes", "oldest"),
        ("full_document", "updatelookup", "updateLookup"),
        ("full_document_before_change", "requird", "required"),
        ("start_from", "noww", "now"),
        ("commit", "inlined", "inline"),
    ],
)
def test_an_unknown_choice_names_the_nearest_and_all(name: str, value: str, suggestion: str) -> None:
    """P9: the message names the cause and the cure."""
    with pytest.raises(ConfigurationError, match=rf"{name}='{value}' is unknown \(did you mean '{suggestion}'\?\)"):
        make(**{name: value})


@pytest.mark.parametrize("value", [[], {}, 3, b"halt"])
def test_a_choice_of_another_type_is_refused_in_the_same_way(value: object) -> None:
    """P9: an unhashable value is no TypeError."""
    with pytest.raises(ConfigurationError, match=r"failure_policy=.* is unknown"):
        make(failure_policy=value)


def test_a_snapshot_after_lost_history_is_asked_for_by_a_command() -> None:
    """P9: who has read of it elsewhere learns what there is instead."""
    with pytest.raises(ConfigurationError, match=r"changes snapshot start HANDLER`.*choose 'oldest' or 'now'"):
        make(on_history_lost="snapshot")


def test_the_start_may_be_a_resume_token() -> None:
    """As `change.resume_token` has it."""
    token = {"_data": "826B02CA8B0000000F2B0229296E04"}
    assert make(start_from=token).start_from == token
    assert make(start_from={**token, "_typeBits": b"\x01"})


@pytest.mark.parametrize(
    "token", [{}, {"_data": 1}, {"_data": "82"}, {"_data": "826B02CA8B0000000G"}, {"_id": {"_data": "82" + "0" * 20}}]
)
def test_what_is_no_resume_token_is_refused(token: dict[str, Any]) -> None:
    """P9: an event, a part of a token, or something else."""
    with pytest.raises(ConfigurationError, match="is no resume token"):
        make(start_from=token)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_expanded_events_are_shown_or_not(value: object) -> None:
    """P9: a text from a settings file is no answer."""
    assert make(show_expanded_events=True).show_expanded_events
    with pytest.raises(ConfigurationError, match=r"show_expanded_events=.* must be True or False"):
        make(show_expanded_events=value)


def test_the_start_may_be_a_time() -> None:
    """A Timestamp of the cluster or a datetime with a zone."""
    assert make(start_from=Timestamp(1, 2)).start_from == Timestamp(1, 2)
    assert make(start_from=datetime(2024, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("value", "words"),
    [(datetime(2024, 1, 1), "without a time zone"), (17, "a bson Timestamp"), (None, "a bson Timestamp")],  # noqa: DTZ001
)
def test_a_start_that_names_no_moment_is_refused(value: object, words: str) -> None:
    """P1: hours of changes lie between two readings of a datetime without a zone."""
    with pytest.raises(ConfigurationError, match=words):
        make(start_from=value)


def test_a_misspelt_option_names_the_right_one() -> None:
    """P9: `Bridge(partitons=4)` must not run with 16."""
    with pytest.raises(ConfigurationError, match=r"option 'partitons' is unknown \(did you mean 'partitions'\?\)"):
        merge_options({"partitons": 4}, {})
    with pytest.raises(ConfigurationError, match=r"option 'xyzzy' is unknown\."):
        merge_options({"xyzzy": 4}, {})


@pytest.mark.parametrize(
    ("namespace", "setting", "meant"),
    [
        (None, "mongo_celery_partitons", "mongo_celery_partitions"),
        ("CELERY", "CELERY_MONGO_CELERY_PARTITON", "CELERY_MONGO_CELERY_PARTITIONS"),
        ("CELERY", "CELERY_MONGO_CELERY_DATABASE_URI", "CELERY_MONGO_CELERY_DATABASE_URL"),
    ],
)
def test_a_misspelt_setting_names_the_right_one(namespace: str | None, setting: str, meant: str) -> None:
    """P9: the same for settings, which come from far away; both are spelt as their user spells them."""
    app = celery_app()
    app.config_from_object(settings_module(**{setting: 4}), namespace=namespace)
    with pytest.raises(ConfigurationError, match=rf"{setting} is unknown \(did you mean '{meant}'"):
        _ = Bridge(app, "mongodb://localhost").options


def test_arguments_win_over_settings_and_settings_over_defaults() -> None:
    """The order that Celery's users expect."""
    options = merge_options({"partitions": 2}, {"partitions": 3, "run_size": 7, "database_url": "mongodb://h"})
    assert (options.partitions, options.run_size, options.claim_ttl) == (2, 7, 10.0)


def test_each_option_but_the_name_can_be_a_setting() -> None:
    """No other option can be given in one way only; a name in the settings is refused, not ignored."""
    defaults = {field.name: getattr(make(), field.name) for field in fields(BridgeOptions)}
    assert set(defaults) == set(OPTION_NAMES)
    del defaults["name"]
    assert merge_options({}, defaults) == make()
    with pytest.raises(ConfigurationError, match=r"mongo_celery_name comes too late.*Bridge\(name='...'\)"):
        merge_options({}, {"name": "shop"})


@pytest.mark.parametrize(
    ("settings", "namespace"),
    [
        (
            {"mongo_celery_partitions": 32, "mongo_celery_lease_ttl": 20, "mongo_celery_database_url": "mongodb://h"},
            None,
        ),
        (
            {
                "CELERY_MONGO_CELERY_PARTITIONS": 32,
                "CELERY_MONGO_CELERY_LEASE_TTL": 20,
                "CELERY_MONGO_CELERY_DATABASE_URL": "mongodb://h",
                "MONGO_CELERY_PARTITIONS": 5,
                "DEBUG": True,
            },
            "CELERY",
        ),
    ],
    ids=["celery", "django"],
)
def test_a_bridge_reads_its_settings_from_the_app(settings: dict[str, Any], namespace: str | None) -> None:
    """Under a namespace, as Django has it, the same names in capitals behind it; others are not ours."""
    app = celery_app()
    bridge = Bridge(app, run_size=3)
    app.config_from_object(settings_module(**settings), namespace=namespace)
    assert (bridge.options.partitions, bridge.options.lease_ttl, bridge.options.run_size) == (32, 20.0, 3)
    assert bridge.url == "mongodb://h"


def test_settings_may_also_be_set_on_the_app_itself() -> None:
    """`app.conf` before or after the bridge is made, and keyword arguments of the app."""
    app = celery_app(mongo_celery_partitions=5)
    bridge = Bridge(app)
    app.conf.mongo_celery_run_size = 6
    app.conf.update(mongo_celery_max_crashes=7)
    assert (bridge.options.partitions, bridge.options.run_size, bridge.options.max_crashes) == (5, 6, 7)


def test_a_bridge_without_a_url_says_where_it_may_come_from() -> None:
    """P9: the message names both ways."""
    with pytest.raises(ConfigurationError, match=r"Bridge\(app, url\),? or set mongo_celery_database_url"):
        _ = Bridge(celery_app()).url


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("mongodb://h/shop?replicaSet=rs0", "shop"),
        ("mongodb://user:pass@h,i:27018/?replicaSet=rs0", None),
        ("mongodb+srv://h.example.net/shop?w=majority", "shop"),
        ("mongodb+srv://h.example.net", None),
    ],
)
def test_the_default_database_is_that_of_the_url(url: str, database: str | None) -> None:
    """Read from the text alone: nothing connects, and no name is looked up."""
    assert Bridge(celery_app(), url).default_database == database


def test_a_url_that_is_none_is_refused_without_showing_it() -> None:
    """P9: a URL may carry a password."""
    with pytest.raises(ConfigurationError, match="MongoDB URL of bridge shop is not valid") as caught:
        _ = Bridge(celery_app(), "redis://user:secret@h").default_database
    assert "secret" not in str(caught.value)
