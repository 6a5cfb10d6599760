"""An outcome that cannot be written down becomes one that can; no change is dispatched for ever without a count."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.outcome_handlers"
NAMES = ("halting_words", "skipping_words", "letter_words", "unprepared", "annotated", "hooked")


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give a bridge with all of the handlers, each with one partition."""
    return shared_deployment(*NAMES, include=HANDLERS, options={"partitions": 1}, start="both")


def _write(chain: Deployment, handler: str, key: str, **document: Any) -> Due:
    """Write one change whose handler ends as the document says."""
    chain.data[handler].insert_one({"_id": key, "n": 1, **document})
    return Due(handler, key, 1)


def _letter(chain: Deployment, item: Due) -> Document:
    def there() -> Document | None:
        return next((each for each in chain.letters(item.handler) if item.key in each["key"]), None)

    return wait_for(there, message=lambda: str(chain.of(item)))


def test_a_failure_that_cannot_be_told_reaches_its_policy(chain: Deployment) -> None:
    """
    An exception whose `__str__` and `__repr__` raise, for each policy; the handler ran once.

    A retry without a time cannot be parked: it is the handler's failure.
    """
    skipped = _write(chain, "skipping_words", "mute", ends="unprintable")
    never = _write(chain, "skipping_words", "never", ends="retry_never")
    letter = _write(chain, "letter_words", "mute", ends="unprintable")
    halted = _write(chain, "halting_words", "mute", ends="unprintable")
    state = chain.wait_state(halted, lambda state: state["state"] == "halted")
    found = _letter(chain, letter)
    assert found["error"] == state["retry"]["error"] == _letter(chain, skipped)["error"]
    assert found["error"].startswith("UnprintableError ")
    assert "_unprintable" in found["traceback"]
    assert _letter(chain, never)["error"].startswith("HandlerUsageError: ")
    assert [len(chain.starts(item)) for item in (halted, skipped, letter, never)] == [1] * 4

    odd = _write(chain, "letter_words", "odd", ends="oddly")
    assert _letter(chain, odd)["error"] == "OddlyWordedError: nul \0 surrogate ? dollar $x"


def test_a_handler_that_changes_its_event_moves_no_position(chain: Deployment) -> None:
    """The position is that of the bytes that were read: a larger token would pass over changes."""
    first = _write(chain, "letter_words", "first", tampers=True)
    second = _write(chain, "letter_words", "second", tampers=True, ends="oddly")
    third = _write(chain, "letter_words", "third")
    last = chain.wait_started(third).seq or 0
    state = chain.wait_state(third, lambda state: state["committed"] >= last)
    letter = _letter(chain, second)
    assert letter["resumeToken"]["_data"] < state["resumeToken"]["_data"] < "F" * 32
    assert [len(chain.starts(item)) for item in (first, second, third)] == [1, 1, 1]


@pytest.mark.parametrize("handler", ["unprepared", "annotated"])
def test_a_preparation_that_fails_is_the_changes_failure(chain: Deployment, handler: str) -> None:
    """`before_start` of a base class or of `task_annotations` runs under the claim."""
    item = _write(chain, handler, "key")
    letter = _letter(chain, item)
    assert (letter["error"], letter["attempts"]) == ("RuntimeError: not prepared", 1)
    assert chain.facts["prepared"].count_documents({"handler": {"$regex": handler}}) == 1
    assert chain.starts(item) == []


def test_hooks_that_fail_change_no_outcome(chain: Deployment) -> None:
    """`on_success`, `on_failure` and `after_return` come after it; a receiver of `task_prerun` is only logged."""
    good, bad = _write(chain, "hooked", "good"), _write(chain, "hooked", "bad", ends="oddly")
    _letter(chain, bad)
    assert len(chain.letters("hooked")) == 1
    assert [len(chain.starts(item)) for item in (good, bad)] == [1, 1]
    wait_for(lambda: chain.facts["hook"].find_one({"name": "on_success"}))
    assert chain.facts["hook"].count_documents({"name": "before_start"}) == 2


@pytest.mark.parametrize("broker", ["refuses", pytest.param("is away", marks=pytest.mark.slow)])
def test_a_commit_link_that_cannot_be_published_fails_no_task(deployment: MakeDeployment, broker: str) -> None:
    """I15: the handler has succeeded: in log, hooks and state. The listener commits."""
    chain = deployment("hooked", include=HANDLERS, options={"partitions": 1}, start="both")
    item = _write(chain, "hooked", "key", do={"gate": "open"})
    chain.wait_started(item)
    if broker == "refuses":
        with chain.broker as redis:
            redis.config_set("maxmemory", "1")
    else:
        chain.redis.kill()
    chain.open_gate("open")
    chain.wait_state(item, lambda state: state["committed"] == 1)
    wait_for(lambda: chain.facts["hook"].find_one({"name": {"$in": ["on_success", "on_failure"]}}))
    assert [each["name"] for each in chain.facts["hook"].find().sort("at")] == ["before_start", "on_success"]
    worker = next(text for name, text in chain.logs.items() if "worker" in name)
    assert worker.count("could not send the commit message") == 1
    assert "raised unexpected" not in worker
