"""An outcome that cannot be written down becomes one that can; no change is dispatched for ever without a count."""

from __future__ import annotations

from typing import Any

import bson
import pytest

from mongo_celery.bridge.state.backlog import unpack_event
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, Make, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.outcome_handlers"


@pytest.fixture
def make_chain(deployment: MakeDeployment) -> Make:
    """Give a function that starts a bridge with some of the handlers, each with one partition."""
    return lambda *handlers: deployment(*handlers, include=HANDLERS, options={"partitions": 1}, start="both")


def _write(chain: Deployment, handler: str, key: str, **document: Any) -> Due:
    """Write one change whose handler ends as the document says, and wait until it is done or stands."""
    item = Due(handler, key, 1)
    chain.data[handler].insert_one({"_id": key, "n": 1, **document})
    return item


def _letter(chain: Deployment, item: Due) -> Document:
    def there() -> Document | None:
        found = [each for each in chain.letters(item.handler) if item.key in each["key"]]
        return found[0] if found else None

    return wait_for(there, message=lambda: str(chain.of(item)))


def _nested(depth: int) -> Document:
    document: Document = {"end": 1}
    for _ in range(depth):
        document = {"a": document}
    return document


def test_a_failure_that_cannot_be_told_reaches_its_policy(make_chain: Make) -> None:
    """An exception whose `__str__` and `__repr__` raise, for each policy; the handler ran once."""
    chain = make_chain("halting_words", "skipping_words", "letter_words")
    halted, skipped, letter = (
        _write(chain, handler, "mute", ends="unprintable")
        for handler in ("halting_words", "skipping_words", "letter_words")
    )
    state = chain.wait_state(halted, lambda state: state["state"] == "halted")
    chain.wait_state(skipped, lambda state: state["committed"] == 1)
    assert state["retry"]["error"] == "UnprintableError (its text cannot be read: ValueError)"
    assert _letter(chain, letter)["error"] == state["retry"]["error"]
    assert "_unprintable" in _letter(chain, letter)["traceback"]
    assert [len(chain.starts(item)) for item in (halted, skipped, letter)] == [1, 1, 1]

    odd = _write(chain, "letter_words", "odd", ends="oddly")
    assert _letter(chain, odd)["error"] == "OddlyWordedError: nul \0 surrogate ? dollar $x"


def test_a_dead_letter_that_is_too_deep_keeps_its_change_as_bytes(make_chain: Make) -> None:
    """A document that is nested as deep as the server takes one does not fit into another; nothing of it is lost."""
    chain = make_chain("letter_words")
    deep = _nested(177)
    item = _write(chain, "letter_words", "deep", ends="oddly", deep=deep)
    letter = _letter(chain, item)
    assert letter["change"]["ns"] == {"db": chain.data.name, "coll": "letter_words"}
    assert bson.decode(unpack_event(letter))["fullDocument"]["deep"] == deep
    assert chain.of(item)["committed"] == 1
    assert len(chain.starts(item)) == 1


def test_a_handler_that_changes_its_event_moves_no_position(make_chain: Make) -> None:
    """The position is that of the bytes that were read: a larger token would pass over changes."""
    chain = make_chain("letter_words")
    first = _write(chain, "letter_words", "first", tampers=True)
    second = _write(chain, "letter_words", "second", tampers=True, ends="oddly")
    third = _write(chain, "letter_words", "third")
    state = chain.wait_state(third, lambda state: state["committed"] == 3)
    letter = _letter(chain, second)
    assert letter["resumeToken"]["_data"] < state["resumeToken"]["_data"] < "F" * 32
    assert [len(chain.starts(item)) for item in (first, second, third)] == [1, 1, 1]


def test_a_retry_without_a_time_is_the_handlers_failure(make_chain: Make) -> None:
    """What cannot be parked goes to the failure policy, with a sentence that names the cause."""
    chain = make_chain("skipping_words")
    item = _write(chain, "skipping_words", "never", ends="retry_never")
    state = chain.wait_state(item, lambda state: state["committed"] == 1)
    assert state["state"] == "flowing"
    assert len(chain.starts(item)) == 1
    said = "(failure_policy skip): HandlerUsageError: retry() needs a number of seconds"
    wait_for(lambda: any(said in text for text in chain.logs.values()))


@pytest.mark.parametrize("handler", ["unprepared", "annotated"])
def test_a_preparation_that_fails_is_the_changes_failure(make_chain: Make, handler: str) -> None:
    """
    `before_start` of a base class or of `task_annotations` runs under the claim.

    It ran before it: once for each dispatch, for ever and uncounted.
    """
    chain = make_chain(handler)
    item = _write(chain, handler, "key")
    letter = _letter(chain, item)
    assert letter["error"] == "RuntimeError: not prepared"
    assert letter["attempts"] == 1
    assert chain.facts["prepared"].count_documents({}) == 1
    assert chain.starts(item) == []


def test_hooks_that_fail_change_no_outcome(make_chain: Make) -> None:
    """`on_success`, `on_failure` and `after_return` come after it; a receiver of `task_prerun` is only logged."""
    chain = make_chain("broken_hooks")
    good = _write(chain, "broken_hooks", "good")
    chain.wait_state(good, lambda state: state["committed"] == 1)
    bad = _write(chain, "broken_hooks", "bad", ends="oddly")
    chain.wait_state(bad, lambda state: state["committed"] == 2)
    assert len(chain.letters("broken_hooks")) == 1
    assert [len(chain.starts(item)) for item in (good, bad)] == [1, 1]


@pytest.mark.parametrize("broker", ["refuses", pytest.param("is away", marks=pytest.mark.slow)])
def test_a_commit_link_that_cannot_be_published_fails_no_task(make_chain: Make, broker: str) -> None:
    """I15: the handler has succeeded: in log, hooks and state. The listener commits."""
    chain = make_chain("hooked")
    item = _write(chain, "hooked", "key", do={"gate": "open"})
    chain.wait_started(item)
    if broker == "refuses":
        with chain.broker as redis:
            redis.config_set("maxmemory", "1")
    else:
        chain.redis.kill()
    chain.open_gate("open")
    chain.wait_state(item, lambda state: state["committed"] == 1)
    wait_for(lambda: list(chain.facts["hook"].find({"name": {"$in": ["on_success", "on_failure"]}})))
    worker = next(text for name, text in chain.logs.items() if "worker" in name)
    assert worker.count("could not send the commit message") == 1
    assert [each["name"] for each in chain.facts["hook"].find().sort("at")] == ["before_start", "on_success"]
    assert "raised unexpected" not in worker
