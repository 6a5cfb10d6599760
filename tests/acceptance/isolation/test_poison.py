"""
P12: a document or a function that spoils one change stops at most the partition of that change.

Each test is a real bridge that must never be started again to go on, and that starts again at any time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import bson
import pytest
from bson import Decimal128, Int64, MaxKey, MinKey, ObjectId, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.partitioning import document_hash, partition_hash
from mongo_celery.bridge.state.backlog import unpack_event
from mongo_celery.embedded import RedisServer
from tests.fixtures.mongo import empty, sparse
from tests.fixtures.process import Processes, ProjectProcess, wait_for

Document = dict[str, Any]

APP = "tests.acceptance.isolation.poison_project"
PARTITIONS = 4
NO_CUSTOMER = partition_hash(None) % PARTITIONS
"""Where documents without a customer belong once the partition rule is corrected."""


class Rig:
    """One bridge of the project, with databases and a broker of its own."""

    def __init__(self, client: MongoClient[Document], url: str, directory: Path, **environment: str) -> None:
        self.name = f"poison_{uuid4().hex[:8]}"
        self.client = client
        self.data = client[f"{self.name}_data"]
        self.state = client[f"{self.name}_state"]
        self.redis = RedisServer()
        directory.mkdir(exist_ok=True)
        self._processes = Processes(directory)
        self._url = f"{url}&uuidRepresentation=standard"
        self._environment = environment

    def __enter__(self) -> Self:
        self.redis.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__()
        self.redis.stop()
        for suffix in ("data", "state", "facts"):
            empty(self.client, f"{self.name}_{suffix}")

    def run(self, *arguments: str, **environment: str) -> ProjectProcess:
        """Start one of the project's commands."""
        needed = {"POISON_NAME": self.name, "POISON_MONGO": self._url, "POISON_BROKER": self.redis.url}
        return self._processes.celery(APP, *arguments, environment={**needed, **self._environment, **environment})

    def listener(self, **environment: str) -> ProjectProcess:
        """Start a listener that leads."""
        started = self.run("listener", "-l", "INFO", **environment)
        started.wait_for_output("reading from")
        return started

    def worker(self) -> ProjectProcess:
        """Start a worker that consumes."""
        started = self.run("worker", "-c", "2", "--without-gossip", "--without-mingle", "-l", "INFO")
        started.wait_for_output(r" ready\.")
        return started

    def command(self, *arguments: str) -> str:
        """What a command writes; it must succeed."""
        process = self.run("changes", *arguments)
        assert process.wait() == 0, process.text
        return process.text

    def status(self) -> Document:
        """As the command shows it."""
        process = self.run("changes", "status", "--json")
        process.wait()  # its status is that of the verdict
        lines = process.text.splitlines()
        found: Document = json.loads(next(line for line in lines if line.startswith("{")))
        return found

    def insert(self, collection: str, _id: Any, **fields: Any) -> None:
        """Insert one document."""
        self.data[collection].insert_one({"_id": _id, **fields})

    def handled(self, handler: str) -> list[Document]:
        """What a handler has had, in the order of time."""
        return list(self.client[f"{self.name}_facts"]["handled"].find({"handler": handler}).sort("at"))

    def ids(self, handler: str) -> list[Any]:
        """The keys that a handler has had."""
        return [bson.decode(each["key"])[""] for each in self.handled(handler)]

    def wait_ids(self, handler: str, expected: set[Any]) -> None:
        """Wait until a handler has had these keys."""
        wait_for(
            lambda: expected <= set(self.ids(handler)),
            message=lambda: f"{handler}: {expected - set(self.ids(handler))} missing",
        )

    def partitions(self, handler: str) -> list[Document]:
        """The partitions of a handler, by index."""
        return list(sparse(self.state["partitions"]).find({"handler": handler}).sort("partition"))

    def wait_halted(self, handler: str, indexes: set[int]) -> None:
        """Wait until exactly these partitions of a handler are halted."""

        def halted() -> set[int]:
            return {index for index, each in enumerate(self.partitions(handler)) if each["state"] == "halted"}

        wait_for(lambda: halted() == indexes, message=lambda: f"{handler}: halted {halted()}, expected {indexes}")

    def wait_letters(self, handler: str, count: int) -> list[Document]:
        """Wait for so many dead letters of a handler, and return them; the raw ones as they were stored."""
        letters = self.state.get_collection(
            "dead_letters", codec_options=bson.CodecOptions(unicode_decode_error_handler="replace")
        )
        wait_for(lambda: letters.count_documents({"handler": handler}) >= count)
        found = list(letters.find({"handler": handler}).sort("_id"))
        assert len(found) == count
        return found


@pytest.fixture(scope="module")
def rig(mongo_client: MongoClient[Document], mongo_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Give a bridge with a listener and a worker that are never started again."""
    with Rig(mongo_client, mongo_url, tmp_path_factory.mktemp("poison")) as started:
        listener, worker = started.run("listener", "-l", "INFO"), started.worker()
        listener.wait_for_output("reading from")
        yield started
        assert listener.running
        assert worker.running


def partitions_of(status: Document, handler: str) -> list[Document]:
    """The partitions of a handler, as `status` shows them."""
    (found,) = [each["partitions"] for each in status["handlers"] if each["name"] == handler]
    return list(found)


def broken(document: Mapping[str, Any]) -> RawBSONDocument:
    """A document with text that is no UTF-8 in place of `????`."""
    return RawBSONDocument(bson.encode(document).replace(b"????", b"\xff\xfe\x80\xff"))


ODD_KEYS: dict[str, Any] = {
    "a uuid": Binary(uuid.UUID(int=7).bytes, 4),
    "an old uuid": Binary(uuid.UUID(int=7).bytes, 3),
    "a damaged uuid": Binary(b"short", 4),
    "a date beyond the year 9999": DatetimeMS(253_402_300_800_000 + 5),
    "the last date": DatetimeMS((1 << 63) - 1),
    "the first date": DatetimeMS(-(1 << 63)),
    "NaN": float("nan"),
    "infinity": float("-inf"),
    "minus zero": -0.0,
    "a decimal NaN": {"d": Decimal128("-NaN")},
    "a decimal infinity": Decimal128("Infinity"),
    "a subnormal decimal": Decimal128("1E-6176"),
    "a large decimal": Decimal128("9.999999999999999999999999999999999E+6144"),
    "MinKey": MinKey(),
    "MaxKey": MaxKey(),
    "code with scope": Code("x", {"y": 1.0}),
    "a nested regex": {"r": bson.Regex("a+", "i")},
    "nested arrays": {"a": [[1, [2.0, {"b": None}]], []]},
    "a deep one": bson.decode(b"\x05\x00\x00\x00\x00"),
    "a long string": "x" * 200_000,
    "one of 3 MB": "x" * 3_000_000,
    "null": None,
    "true": True,
    "a timestamp": Timestamp(1, 1),
    "an object id": ObjectId(),
    "a large integer": Int64(-(1 << 63)),
    "text that is no UTF-8": "bad ????",
    "a name that is no UTF-8": {"????": {"n": 1.0}},
}


def _deep(depth: int) -> Document:
    return {"a": _deep(depth - 1)} if depth else {}


ODD_KEYS["a deep one"] = _deep(150)


def test_every_odd_key_reaches_its_handler_in_order_or_the_policy(rig: Rig) -> None:
    """I4: with `uuidRepresentation=standard` in the URL, and whatever else can be an `_id`."""
    raws = {name: broken({"_id": value}) for name, value in ODD_KEYS.items()}
    numbered = {name: broken({"_id": value, "n": 1}) for name, value in ODD_KEYS.items()}
    for document in numbered.values():
        rig.data["odd"].insert_one(document)
    for n in (2, 3):
        for raw in raws.values():
            assert rig.data["odd"].update_one(raw, {"$set": {"n": n}}).matched_count == 1
    rig.insert("odd", "last")
    unreadable = {name for name in raws if name.endswith("UTF-8")} | {"a damaged uuid"}
    letters = rig.wait_letters("odd", 3 * len(unreadable))
    wanted = 3 * (len(ODD_KEYS) - len(unreadable)) + 1
    wait_for(lambda: len(rig.handled("odd")) >= wanted, message=lambda: f"{len(rig.handled('odd'))} of {wanted}")

    by_key: dict[bytes, list[int]] = {}
    for fact in rig.handled("odd"):
        by_key.setdefault(fact["key"], []).append(fact["n"])
    assert by_key.pop(bson.encode({"": "last"})) == [None]
    assert {key: numbers for key, numbers in by_key.items() if numbers != [1, 2, 3]} == {}
    assert len(by_key) == len(ODD_KEYS) - len(unreadable)
    assert {letter["error"].partition(":")[0] for letter in letters} == {"InvalidBSON"}
    for letter in rig.state["dead_letters"].find({"handler": "odd"}):
        change = letter["change"]
        event = RawBSONDocument(unpack_event(letter) if "raw" in letter else bson.encode(change))
        assert any(event["documentKey"].raw == raw.raw for raw in raws.values())
    assert rig.status()["state"] == "leading"


def test_a_document_with_a_giant_id_becomes_a_dead_letter_and_its_handler_goes_on(rig: Rig) -> None:
    """P1, P9, P12: no server can pass it on, so nothing halts, and the verdict names it until it is discarded."""
    rig.insert("halt", "k" * 8_000_000, customer=1)
    rig.insert("skip", "k" * 3_000_000)  # the partition rule fails on it
    for index in range(PARTITIONS):
        rig.insert("halt", f"behind {index}", customer=_customer(index))
    rig.wait_ids("halt", {f"behind {index}" for index in range(PARTITIONS)})
    (letter,) = rig.wait_letters("halt", 1)
    assert (letter["kept"], letter["cause"], letter["attempts"]) == ("name", "failed", 0)
    assert rig.wait_letters("skip", 1)[0]["error"].startswith("RefusedChangeError: partition_by")
    rig.wait_halted("halt", set())
    names = ("`_id`", "insert", f"{rig.data.name}.halt", letter["change"]["clusterTime"].as_datetime().isoformat())
    assert all(name in letter["error"] for name in names)
    (reason,) = [each for each in rig.status()["findings"] if each["code"] == "dead_letters"]
    assert all(name.strip("`") in reason["sentence"] for name in names), "no foreign text looks like a command"
    rig.command("dead-letters", "discard", "halt", "--yes")
    assert rig.status()["oversized"] is None


def test_the_name_of_an_updated_field_that_is_no_utf8_is_judged_like_others(rig: Rig) -> None:
    """I4: `fields` looks at names that users choose."""
    rig.insert("fielded", 1)
    rig.data["fielded"].update_one({"_id": 1}, [{"$replaceWith": {"$mergeObjects": ["$$ROOT", broken({"????": 1})]}}])
    rig.data["fielded"].update_one({"_id": 1}, [{"$set": {"n": 2}}])
    rig.insert("fielded", "last")
    rig.wait_ids("fielded", {1, "last"})
    assert [fact["n"] for fact in rig.handled("fielded")].count(None) == 2  # the broken name is not one of `fields`


@pytest.mark.parametrize("asked", ["far", "infinite", "year 10000", "naive"])
def test_a_retry_that_never_comes_parks_its_change_and_nothing_else(rig: Rig, asked: str) -> None:
    """I5: a time that cannot be read back ended listener and commands for ever."""
    before = set(rig.ids("halt"))
    rig.insert("halt", asked, retry=asked, customer=_customer(0))
    wait_for(lambda: (rig.partitions("halt")[0]["retry"] or {}).get("notBefore"))
    parked = rig.partitions("halt")[0]["retry"]["notBefore"]
    assert datetime(2100, 1, 1) < parked < datetime(2300, 1, 1)  # noqa: DTZ001 - as the state has it
    rig.insert("halt", f"beside {asked}", customer=_customer(1))
    rig.wait_ids("halt", before | {asked, f"beside {asked}"})
    (status,) = [each for each in partitions_of(rig.status(), "halt") if not each["index"]]
    assert status["state"] == "retrying"
    rig.data["halt"].update_one({"_id": asked}, {"$unset": {"retry": 1}})
    rig.state["partitions"].update_one(
        {"_id": {"$regex": "^poison/halt/[0-9]+/0$"}}, {"$set": {"retry.notBefore": datetime(2000, 1, 1, tzinfo=UTC)}}
    )
    wait_for(lambda: rig.ids("halt").count(asked) == 2)


@pytest.mark.parametrize("asked", ["before the epoch", "recent", "negative"])
def test_a_retry_in_the_past_comes_at_once(rig: Rig, asked: str) -> None:
    """I5: also one from the year 1, in a time zone ahead of its."""
    rig.insert("skip", asked, retry=asked, customer=1)
    wait_for(lambda: rig.ids("skip").count(asked) == 2, message=lambda: str(rig.ids("skip")))


def test_a_retry_without_a_time_is_an_error_of_the_handler(rig: Rig) -> None:
    """I5: it had no outcome at all, and its claim lapsed again and again."""
    rig.insert("dead_letter", "nan", retry="nan", customer=1)
    (letter,) = rig.wait_letters("dead_letter", 1)
    assert letter["error"].startswith("HandlerUsageError: retry() needs a number of seconds or a datetime")


def test_a_handler_that_spoils_its_event_cannot_move_the_position(rig: Rig) -> None:
    """I5: a larger token in `change.raw` would have lost what comes before it."""
    customer = _customer(2)
    rig.insert("skip", "spoilt", spoil=True, customer=customer)
    rig.insert("skip", "behind", customer=customer)
    rig.wait_ids("skip", {"spoilt", "behind"})
    token = rig.partitions("skip")[2]["resumeToken"]
    assert token["_data"].startswith("82")
    assert len(token["_data"]) > 60


def test_a_match_that_fails_on_one_document_halts_its_partition_alone(rig: Rig) -> None:
    """I4: the server refuses the whole batch; the handlers without a `match` get the event as always."""
    bad, good = _key(rig, "matched", 1), _key(rig, "matched", 2)
    rig.insert("matched", bad, good="no number")
    rig.insert("matched", good, good="1")
    rig.insert("skip", "beside", customer=1)
    rig.wait_halted("matched", {1})
    rig.wait_ids("matched", {good})
    rig.wait_ids("skip", {"beside"})
    assert rig.partitions("matched")[1]["retry"]["error"].startswith("RefusedChangeError: ")
    rig.command("skip", "matched", "1", "--yes")
    rig.wait_halted("matched", set())


def _customer(index: int) -> int:
    """A customer of this partition."""
    return next(number for number in range(100) if partition_hash(number) % PARTITIONS == index)


def _key(rig: Rig, handler: str, index: int, number: int = 0, database: str | None = "") -> int:
    """The `_id` of a document of this partition, by its document key."""
    ns = {"db": rig.data.name, "coll": handler} if database is not None else {"coll": handler}
    found = (
        number
        for number in range(1000)
        if document_hash({"ns": ns, "documentKey": {"_id": number}}) % PARTITIONS == index
    )
    for _ in range(number):
        next(found)
    return next(found)


@pytest.mark.slow
def test_a_partition_rule_that_fails_goes_to_the_policy_and_a_corrected_one_loses_nothing(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path
) -> None:
    """
    I4, P12, P13: refused changes keep their partition.

    By the corrected rule they would belong to one that has committed later changes already.
    """
    assert NO_CUSTOMER not in (0, 1)
    policies = ("halt", "dead_letter", "skip")
    with Rig(mongo_client, mongo_url, tmp_path / "rule") as rig:
        listener = rig.listener()
        rig.worker()
        poison = {policy: [_key(rig, policy, 0), _key(rig, policy, 0, 1), _key(rig, policy, 1)] for policy in policies}
        for policy in policies:
            for number in range(4):
                rig.insert(policy, f"before {number}", customer=_customer(number))
            for key in poison[policy]:
                rig.insert(policy, key, poison=True)
            for number in range(4):
                rig.insert(policy, f"after {number}", customer=_customer(number))
            rig.insert(policy, "nobody", customer=None)
        words = [f"before {number}" for number in range(4)] + [f"after {number}" for number in range(4)] + ["nobody"]

        # Each policy, and the changes beside.
        for policy in ("dead_letter", "skip"):
            rig.wait_ids(policy, set(words))
        rig.wait_ids("halt", set(words) - {"after 0", "after 1"})
        rig.wait_halted("halt", {0, 1})
        letters = rig.wait_letters("dead_letter", 3)
        assert {letter["change"]["documentKey"]["_id"] for letter in letters} == set(poison["dead_letter"])
        assert letters[0]["error"].startswith(
            "RefusedChangeError: partition_by of handler dead_letter failed: KeyError: 'customer'"
        )
        assert [letter["attempts"] for letter in letters] == [0, 0, 0]
        shown = {each["index"]: each for each in partitions_of(rig.status(), "halt")}
        assert "partition_by of handler halt failed: KeyError" in shown[0]["error"]
        assert shown[0]["key"] == f"{rig.data.name}.halt insert {poison['halt'][0]}"
        assert listener.text.count("is refused before handler halt") == 1

        # A restart makes nothing better and nothing worse; neither does a retry.
        listener.end()
        listener = rig.listener()
        rig.insert("halt", "later", customer=_customer(2))
        rig.wait_ids("halt", {"later"})
        rig.wait_halted("halt", {0, 1})
        rig.wait_letters("dead_letter", 3)
        fence = rig.partitions("halt")[0]["fencingToken"]
        rig.command("retry", "halt", "0")
        wait_for(lambda: rig.partitions("halt")[0]["fencingToken"] > fence + 1)
        rig.wait_halted("halt", {0, 1})
        rig.command("skip", "halt", "1", "--yes")
        rig.wait_ids("halt", {"after 1"})

        # The corrected rule: what was refused runs where it stood.
        assert listener.terminate() == 0
        rig.listener(POISON_CURED="1")
        rig.command("retry", "--yes")
        rig.wait_ids("halt", {*poison["halt"][:2], "after 0"})
        every: dict[str, set[Any]] = {policy: set(words) for policy in policies}
        every["halt"] |= {"later", *poison["halt"][:2]}
        for policy, expected in every.items():
            assert sorted(map(str, rig.ids(policy))) == sorted(map(str, expected))  # each of them once
        rig.wait_halted("halt", set())
        ran = [fact["partition"] for fact in rig.handled("halt") if bson.decode(fact["key"])[""] in poison["halt"]]
        assert ran == [0, 0]


# -- every poison, with every policy -----------------------------------------------------------------

KINDS = ("any", "sound", "picky", "aloof")
POLICIES = ("halt", "dead_letter", "skip")
WIDE = 8
MATRIX_OPTIONS = {"partitions": WIDE, "full_document": "updateLookup", "full_document_before_change": "required"}
MEGABYTE = 2**20


@dataclass(frozen=True)
class Poison:
    """
    What spoils an update.

    Attributes:
        first: of the document that is updated.
        fields: what is set.
        error: how the words begin by which it meets the policy.
        concerns: the kinds of handlers that it concerns.
    """

    key: str = "poison"
    first: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    keeps_images: bool = True
    error: str = "RefusedChangeError: This change is larger than 16 MB"
    concerns: Collection[str] = ("any", "sound", "picky")


WHOLESOME = Poison()
POISONS = {
    "an _id that is no UTF-8": Poison(key="????", error="InvalidBSON: "),
    "above 16 MB with the look-up": Poison(fields={"text": "x" * int(8.1 * MEGABYTE)}),
    "20 MB with look-up and image": Poison(first={"text": "x" * 10 * MEGABYTE}),
    "a required image that is missing": Poison(
        keeps_images=False, error="RefusedChangeError: A required image of this change is missing", concerns=KINDS
    ),  # nobody can tell
    "a match that fails": Poison(
        fields={"good": "no number"},
        error="RefusedChangeError: The `match` of picky_dead_letter, picky_halt, picky_skip failed on this change",
        concerns={"picky"},
    ),
}


def test_every_poison_meets_the_policy_of_those_whom_it_concerns_and_no_other_change_does(
    mongo_client: MongoClient[Document], mongo_url: str, tmp_path: Path
) -> None:
    """I4, P12: a poison in a partition each, before handlers of four kinds, each of them with every policy."""
    with Rig(mongo_client, mongo_url, tmp_path / "matrix", POISON_OPTIONS=json.dumps(MATRIX_OPTIONS)) as rig:
        rig.data.create_collection("updated", changeStreamPreAndPostImages={"enabled": True})
        listener, worker = rig.listener(), rig.worker()
        beside = [_key_in(rig, index, "beside") for index in range(WIDE)]
        poisoned = [_key_in(rig, index, poison.key) for index, poison in enumerate(POISONS.values())]
        for key in beside:
            _update(rig, key)
        for key, poison in zip(poisoned, POISONS.values(), strict=True):
            _update(rig, key, poison)
        for key in beside:
            rig.data["updated"].update_one({"_id": key}, {"$set": {"n": 1}})
        words = {(key, n) for key in beside for n in (0, 1)}
        errors = [poison.error for poison in POISONS.values()]
        guilty = {kind: [i for i, each in enumerate(POISONS.values()) if kind in each.concerns] for kind in KINDS}
        flows = {kind: words | {(key, 0) for i, key in enumerate(poisoned) if i not in guilty[kind]} for kind in KINDS}
        flows["aloof"] = set()

        for kind in KINDS:
            _wait_updates(rig, f"{kind}_halt", flows[kind] - {(beside[index], 1) for index in guilty[kind]})
            rig.wait_halted(f"{kind}_halt", {*guilty[kind]})
            for policy in ("dead_letter", "skip"):
                _wait_updates(rig, f"{kind}_{policy}", flows[kind])
                rig.wait_halted(f"{kind}_{policy}", set())
            letters = rig.wait_letters(f"{kind}_dead_letter", len(guilty[kind]))
            assert sorted(letter["partition"] for letter in letters) == guilty[kind]
            for letter in letters:
                assert letter["error"].startswith(errors[letter["partition"]])
                kept = letter["change"]  # what could be read
                event = RawBSONDocument(unpack_event(letter)) if "raw" in letter else kept
                assert event["updateDescription"]["updatedFields"]["n"] == 0
        handlers = rig.status()["handlers"]
        halted = {
            (handler["name"], each["index"]): each
            for handler in handlers
            for each in handler["partitions"]
            if each["state"] == "halted"
        }
        assert set(halted) == {(f"{kind}_halt", index) for kind in KINDS for index in guilty[kind]}
        assert all(each["error"].startswith(errors[index]) for (_, index), each in halted.items())

        # A retry makes nothing better and nothing worse; what is skipped lets the others pass.
        fences = [each["fencingToken"] for each in rig.partitions("picky_halt")]
        rig.command("retry", "--yes")
        for index in guilty["picky"]:
            wait_for(lambda index=index: rig.partitions("picky_halt")[index]["fencingToken"] > fences[index])  # type: ignore[misc]
        rig.wait_halted("picky_halt", {*guilty["picky"]})
        skips = [rig.run("changes", "skip", "picky_halt", str(i), "--yes") for i in guilty["picky"]]
        assert [skip.wait() for skip in skips] == [0] * len(skips)
        _wait_updates(rig, "picky_halt", flows["picky"])
        rig.wait_halted("picky_halt", set())
        assert listener.running
        assert worker.running


def _key_in(rig: Rig, index: int, words: str) -> str:
    """A key of this partition."""

    def event(key: str) -> Mapping[str, Any]:
        document = {"ns": {"db": rig.data.name, "coll": "updated"}, "documentKey": {"_id": key}}
        return wrap_event(bytes(broken(document).raw))

    keys = (f"{words} {number}" for number in range(1000))
    return next(key for key in keys if document_hash(event(key)) % WIDE == index)


def _update(rig: Rig, key: str, poison: Poison = WHOLESOME) -> None:
    """Insert a document, which is nobody's change, and update it."""
    rig.data["updated"].insert_one(broken({"_id": key, "good": "1", **poison.first}))
    images = {"enabled": poison.keeps_images}
    rig.data.command("collMod", "updated", changeStreamPreAndPostImages=images)
    change = {"$set": {"n": 0, **poison.fields}}
    assert rig.data["updated"].update_one(broken({"_id": key}), change).matched_count == 1
    rig.data.command("collMod", "updated", changeStreamPreAndPostImages={"enabled": True})


def _wait_updates(rig: Rig, handler: str, expected: set[tuple[str, int]]) -> None:
    """Wait until a handler has had exactly these updates: keys, and what `n` was set to."""

    def had() -> set[tuple[str, int]]:
        return {(bson.decode(fact["key"])[""], fact["n"]) for fact in rig.handled(handler)}

    wait_for(lambda: had() == expected, message=lambda: f"{handler}: {sorted(had() ^ expected)} missing or too many")
