"""
P12: a document or a function that spoils one change stops at most the partition of that change.

Each test is a real bridge that must never be started again to go on, and that starts again at any time.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import bson
import pytest
from bson import Decimal128, Int64, MaxKey, MinKey, ObjectId, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.partitioning import document_hash, partition_hash
from mongo_celery.bridge.state.backlog import unpack_event
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

HANDLERS = "tests.acceptance.isolation.poison_handlers"
PARTITIONS = 4
_UUIDS = "uuidRepresentation=standard"


class Rig(Deployment):
    def insert(self, collection: str, _id: Any, **fields: Any) -> None:
        self.data[collection].insert_one({"_id": _id, **fields})

    def handled(self, handler: str) -> list[Document]:
        return list(self.facts["handled"].find({"handler": handler}).sort("at"))

    def ids(self, handler: str) -> list[Any]:
        return [bson.decode(each["key"])[""] for each in self.handled(handler)]

    def wait_ids(self, handler: str, expected: set[Any]) -> None:
        wait_for(
            lambda: expected <= set(self.ids(handler)),
            message=lambda: f"{handler}: {expected - set(self.ids(handler))} missing",
        )

    def wait_halted(self, handler: str, indexes: set[int]) -> None:
        def halted() -> set[int]:
            found = self.state["partitions"].find({"handler": handler, "state": "halted"})
            return {each["partition"] for each in found}

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


def make_rig(deployment: MakeDeployment, url: str, **options: Any) -> tuple[Rig, ProjectProcess, ProjectProcess]:
    """Start a bridge with a listener and a worker, none of which is ever started again."""
    given = {"lease_ttl": 20, "claim_ttl": 4, "dispatch_grace": 3, **options}
    rig = deployment("none of the scripted ones", kind=Rig, include=HANDLERS, options=given, url=f"{url}&{_UUIDS}")
    return rig, *rig.both()


@pytest.fixture(scope="module")
def rig(shared_deployment: MakeDeployment, mongo_url: str) -> Iterator[Rig]:
    made, listener, worker = make_rig(shared_deployment, mongo_url)
    yield made
    assert listener.running
    assert worker.running


def broken(document: Mapping[str, Any]) -> RawBSONDocument:
    """A document with text that is no UTF-8 in place of `????`."""
    return RawBSONDocument(bson.encode(document).replace(b"????", b"\xff\xfe\x80\xff"))


ODD_KEYS: dict[str, Any] = {
    "a uuid": Binary(uuid.UUID(int=7).bytes, 4),
    "a damaged uuid": Binary(b"short", 4),
    "a date beyond the year 9999": DatetimeMS(253_402_300_800_000 + 5),
    "the last date": DatetimeMS((1 << 63) - 1),
    "NaN": float("nan"),
    "a decimal NaN": {"d": Decimal128("-NaN")},
    "MinKey": MinKey(),
    "code with scope": Code("x", {"y": 1.0}),
    "a nested regex": {"r": bson.Regex("a+", "i")},
    "nested arrays": {"a": [[1, [2.0, {"b": None}]], []]},
    "a long string": "x" * 200_000,
    "one of 3 MB": "x" * 3_000_000,
    "other numbers": {
        "n": [float("-inf"), -0.0, Int64(-(1 << 63)), *map(Decimal128, ("Infinity", "1E-6176", "9E+6144"))]
    },
    "other types": {"t": [MaxKey(), True, Timestamp(1, 1), ObjectId(), DatetimeMS(-(1 << 63)), Binary(b"7" * 16, 3)]},
    "a deep one": reduce(lambda inner, _: {"a": inner}, range(150), Document()),
    "null": None,
    "text that is no UTF-8": "bad ????",
    "a name that is no UTF-8": {"????": {"n": 1.0}},
}


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
    assert rig.changes("status")["state"] == "leading"


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
    (reason,) = [each for each in rig.changes("status")["findings"] if each["code"] == "dead_letters"]
    assert all(name.strip("`") in reason["sentence"] for name in names), "no foreign text looks like a command"
    assert rig.changes("dead-letters", "discard", "halt", "--yes")["done"] == 1
    assert rig.changes("status")["oversized"] is None


def _customer(index: int) -> int:
    return next(number for number in range(100) if partition_hash(number) % PARTITIONS == index)


# -- every poison, with every policy -----------------------------------------------------------------

KINDS = ("any", "sound", "picky", "aloof")
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
    deployment: MakeDeployment, mongo_url: str
) -> None:
    """I4, P12: a poison in a partition each, before handlers of four kinds, each of them with every policy."""
    rig, listener, worker = make_rig(deployment, mongo_url, **MATRIX_OPTIONS)
    rig.data.create_collection("updated", changeStreamPreAndPostImages={"enabled": True})
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
    handlers = rig.changes("status")["handlers"]
    halted = {
        (handler["name"], each["partition"]): each
        for handler in handlers
        for each in handler["partitions"]
        if each["state"] == "halted"
    }
    assert set(halted) == {(f"{kind}_halt", index) for kind in KINDS for index in guilty[kind]}
    assert all(each["error"].startswith(errors[index]) for (_, index), each in halted.items())

    # A retry makes nothing better and nothing worse; what is skipped lets the others pass.
    fences = {index: rig.partition("picky_halt", index)["fencingToken"] for index in guilty["picky"]}
    rig.changes("retry", "--yes")
    for index, fence in fences.items():
        wait_for(lambda: rig.partition("picky_halt", index)["fencingToken"] > fence)  # noqa: B023 - in this round only
    rig.wait_halted("picky_halt", {*guilty["picky"]})
    assert rig.changes("skip", "picky_halt", "--yes")["done"] == len(guilty["picky"])
    _wait_updates(rig, "picky_halt", flows["picky"])
    rig.wait_halted("picky_halt", set())
    assert listener.running
    assert worker.running


def _key_in(rig: Rig, index: int, words: str) -> str:
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
