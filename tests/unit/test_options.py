"""The options of a bridge: bounds, relations, names, settings."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery import Bridge
from mongo_celery.bridge.options import BridgeOptions, merge_options
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.table import call_timeout


def make(**options: Any) -> BridgeOptions:
    return BridgeOptions(**options)


def celery_app(**settings: Any) -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False, **settings)


def settings_module(**settings: Any) -> ModuleType:
    module = ModuleType("settings")
    vars(module).update(settings)
    return module


def test_options_that_do_not_fit_together_are_refused() -> None:
    """P6: a grace shorter than a heartbeat and a call would dispatch runs that are alive."""
    assert make(claim_ttl=30, dispatch_grace=19).grace == 19
    for pair in ({"claim_ttl": 30, "dispatch_grace": 18.9}, {"queues": 17}):
        with pytest.raises(ConfigurationError):
            make(**pair)


@pytest.mark.parametrize(
    "name", ["run_seconds", "transaction_seconds", "lease_ttl", "claim_ttl", "dispatch_grace", "start_timeout"]
)
def test_a_duration_may_be_a_timedelta(name: str) -> None:
    assert make(**{name: timedelta(seconds=20)}) == make(**{name: 20})


@given(st.floats(1, 86_400))
def test_one_call_and_one_heartbeat_fit_twice_into_a_ttl(ttl: float) -> None:
    """P6: one beat may fail and the claim lives; the default grace repeats no run whose claim was not seen yet."""
    assert call_timeout(ttl) < ttl / 3
    assert ttl / 3 + 2 * call_timeout(ttl) < ttl
    assert make(claim_ttl=ttl).grace >= ttl / 3 + call_timeout(ttl)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"partitons": 4}, "'partitions'"),
        ({"failure_policy": "dead-letter"}, "'dead_letter'"),
        ({"xyzzy": 4}, "'xyzzy' is unknown"),
    ],
)
def test_a_misspelt_option_or_choice_names_the_right_one(options: dict[str, Any], meant: str) -> None:
    """P9: `Bridge(partitons=4)` must not run with 16."""
    with pytest.raises(ConfigurationError, match=meant):
        merge_options(options, {})


@pytest.mark.parametrize(
    ("namespace", "setting", "meant"),
    [
        (None, "mongo_celery_partitons", "mongo_celery_partitions"),
        ("CELERY", "CELERY_MONGO_CELERY_DATABASE_URI", "CELERY_MONGO_CELERY_DATABASE_URL"),
    ],
)
def test_a_misspelt_setting_names_the_right_one(namespace: str | None, setting: str, meant: str) -> None:
    """P9: settings come from far away; both are spelt as their user spells them."""
    app = celery_app()
    app.config_from_object(settings_module(**{setting: 4}), namespace=namespace)
    with pytest.raises(ConfigurationError, match=rf"{setting}.*'{meant}'"):
        _ = Bridge(app, "mongodb://localhost").options


def test_each_option_but_the_name_can_be_a_setting() -> None:
    defaults = {field.name: getattr(make(), field.name) for field in fields(BridgeOptions)}
    del defaults["name"]
    assert merge_options({}, defaults) == make()
    with pytest.raises(ConfigurationError):
        merge_options({}, {"name": "shop"})
    options = merge_options({"partitions": 2}, {"partitions": 3, "run_size": 7, "database_url": "mongodb://h"})
    assert (options.partitions, options.run_size, options.claim_ttl) == (2, 7, 10.0)


@pytest.mark.parametrize(
    ("prefix", "namespace"), [("mongo_celery_", None), ("CELERY_MONGO_CELERY_", "CELERY")], ids=["celery", "django"]
)
def test_a_bridge_reads_its_settings_from_the_app(prefix: str, namespace: str | None) -> None:
    """Under a namespace, as Django has it, the same names in capitals behind it; others are not ours."""
    app = celery_app()
    bridge = Bridge(app, run_size=3)
    with pytest.raises(ConfigurationError, match="mongo_celery_database_url"):
        _ = Bridge(celery_app()).url
    given = {"partitions": 32, "lease_ttl": 20, "database_url": "mongodb://h"}
    settings = {f"{prefix}{name.upper() if namespace else name}": value for name, value in given.items()}
    app.config_from_object(settings_module(**settings, DEBUG=True), namespace=namespace)
    assert (bridge.options.partitions, bridge.options.lease_ttl, bridge.options.run_size) == (32, 20.0, 3)
    assert bridge.url == "mongodb://h"
    later = celery_app(mongo_celery_partitions=5)
    bridge = Bridge(later)
    later.conf.mongo_celery_run_size = 6
    assert (bridge.options.partitions, bridge.options.run_size) == (5, 6)


def test_the_default_database_is_read_from_the_text_of_the_url() -> None:
    """No name is looked up. P9: a URL may carry a password."""
    assert Bridge(celery_app(), "mongodb+srv://h.example.net/shop?w=majority").wiring.default_database == "shop"
    with pytest.raises(ConfigurationError) as caught:
        _ = Bridge(celery_app(), "redis://user:secret@h").wiring.default_database
    assert "secret" not in str(caught.value)
