"""
Whatever bytes an event has, valid BSON or not: it gets through key, label, filter, envelope and dead letter.

Fields that are read from their own place in the bytes are what a decoder finds there, or its error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
import pytest
from bson import Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.errors import InvalidDocument
from bson.raw_bson import RawBSONDocument
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mongo_celery.bridge.change import FLAGS, describe, read_namespace, token_data, wrap_event
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import document_hash, document_key, partition_hash, partitioner
from mongo_celery.bridge.raw_event import EVENT_TYPES, RawEvent, read_plain
from mongo_celery.bridge.state.backlog import unpack_event
from mongo_celery.bridge.state.dead_letters import FAILED, Place, dead_letter, keep_change
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.filter import Filter
from mongo_celery.bridge.stream.items import ChangeEvent, ReadError
from mongo_celery.bridge.stream.source import Selector, Source
from mongo_celery.bridge.window import Refusal
from mongo_celery.bridge.worker.envelope import Carrier, Run, sign_run
from mongo_celery.mongo.identity import id_key
from tests.fixtures.samples import BSON_VALUES, mark, verify_run

KEY = bytes(range(32))
TOKEN = {"_data": mark(1).data}
DESCRIPTION_CHARS = 600
BEFORE: CodecOptions[RawBSONDocument] = CodecOptions(
    document_class=RawBSONDocument, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
"""How events were read when all errors ended the bridge; what worked then has its partition for ever."""

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1).map(Int64),
    st.integers(-5, 5),
    st.integers(-5, 5).map(float),
    st.floats(),
    st.integers(-5, 5).map(lambda value: Decimal128(str(value))),
    st.sampled_from(["NaN", "-NaN", "sNaN", "Infinity", "-0", "1E-6176", "9E+6111", "1.0", "100E-2"]).map(Decimal128),
    texts,
    st.builds(Binary, st.binary(max_size=20), st.sampled_from([0, 2, 3, 4, 5, 6, 128])),
    st.builds(ObjectId, st.binary(min_size=12, max_size=12)),
    st.integers(-(1 << 63), (1 << 63) - 1).map(DatetimeMS),
    st.builds(Timestamp, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    st.builds(Regex, names, st.integers(0, 63)),
    st.builds(Code, texts, st.none() | st.dictionaries(names, st.integers(0, 3), max_size=2)),
    st.sampled_from([MinKey(), MaxKey(), *BSON_VALUES.values()]),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | st.sampled_from(["$ref", "$id", "$db", "_id"]), inner, max_size=3)
    ),
    max_leaves=8,
)
documents = st.dictionaries(names, values, max_size=4)
events = st.fixed_dictionaries(
    {"_id": st.just(TOKEN) | st.fixed_dictionaries({"_data": names})},
    optional={
        "operationType": st.sampled_from(["insert", "update", "delete", "drop", "invalidate", "other"]) | values,
        "ns": st.just({"db": "shop", "coll": "orders"}) | st.just({"db": "shop"}) | values,
        "documentKey": st.fixed_dictionaries({"_id": values}) | values,
        "fullDocument": documents | st.none() | values,
        "updateDescription": st.fixed_dictionaries(
            {"updatedFields": documents, "removedFields": st.lists(names, max_size=2)},
            optional={"truncatedArrays": st.lists(st.fixed_dictionaries({"field": names}), max_size=2) | values},
        )
        | values,
        FLAGS: st.fixed_dictionaries({"summarise": st.booleans()}) | values,
        "title": values,
    },
)
valid = events.map(bson.encode)


@st.composite
def spoilt(draw: st.DrawFn, whole: st.SearchStrategy[bytes] = valid) -> bytes:
    """Bytes that were an event: some changed, cut off, put in; mostly with lengths that still fit."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(4, len(data) - 1))
        how = draw(st.sampled_from(["change", "by one", "text", "cut", "insert"]))
        if how == "change":
            data[place] = draw(st.integers(0, 255))
        elif how == "by one":
            data[place] = (data[place] + draw(st.sampled_from([1, 255]))) % 256
        elif how == "text":
            data[place : place + 2] = b"\xff\xfe"
        elif how == "cut" and len(data) > 8:
            del data[place : place + draw(st.integers(1, 9))]
        else:
            data[place:place] = draw(st.binary(max_size=9))
    if draw(st.booleans()):
        data[:4] = len(data).to_bytes(4, "little")
        data[-1] = 0
    return bytes(data)


raws = st.one_of(valid, spoilt(), st.binary(max_size=60))


def customer(change: Mapping[str, Any]) -> Any:
    return change["fullDocument"]["customer"]


RULES = [None, "documentKey.region", "fullDocument.customer", customer]
FILTERS = [
    Filter(),
    Filter(operations=frozenset({"update", "drop"}), fields=frozenset({"a", "a.b"})),
    Filter(match={"$eq": [1, 1]}),
]
READ_ERRORS = [None, ReadError("too large"), ReadError("match fails", only_match=True)]


def read(raw: bytes, read_error: ReadError | None = None) -> ChangeEvent | None:
    """As the reader hands it over; None for bytes in which the driver itself finds no document."""
    try:
        document: Mapping[str, Any] = wrap_event(raw)
        len(document)  # the driver reads the top of every event, for its token
    except Exception:  # noqa: BLE001 - the reader's matter: it hands over a read_error and no document
        if read_error is None:
            return None
        document = {}
    return ChangeEvent(mark(1), document, raw, read_error)


@settings(max_examples=150)
@given(raws, st.sampled_from(RULES), st.sampled_from(FILTERS), st.sampled_from(READ_ERRORS))
def test_every_event_is_passed_over_or_has_a_partition_and_always_the_same(
    raw: bytes, rule: Any, chosen: Filter, read_error: ReadError | None
) -> None:
    """P12, P2: never an exception, whatever the bytes are."""
    selector = Selector("summarise", (Source("shop", "orders"),), chosen)
    made = partitioner(rule, "required", "required")

    def admitted() -> tuple[int, Refusal | None] | None:
        event = read(bytes(raw), read_error)
        change = (
            Admission(selector, made, Layout(0, 16, "blake2b-64:_id"), {}).admit(event) if event is not None else None
        )
        return (change.index, change.refusal) if change is not None else None

    first = admitted()
    assert first == admitted()
    if first is not None:
        assert 0 <= first[0] < 16


@settings(max_examples=150)
@given(raws)
@example(bson.encode({"_id": {"_data": "~"}, "operationType": "insert", "title": None}))
def test_every_event_can_be_described_sealed_and_set_aside(raw: bytes) -> None:
    """P12: label, envelope and dead letter; bounded, storable, and with the bytes as they are."""
    text = describe(raw)
    assert len(text) <= DESCRIPTION_CHARS
    bson.encode({"key": text})
    run = Run(
        "shop", "summarise", 2, 7, 5, 41, 41, (raw,), Carrier("id"), Refusal.because("because", halts=True), TOKEN
    )
    assert verify_run("run", sign_run("run", run, KEY), KEY) == run
    found = keep_change(raw)
    letter = dead_letter(
        bridge="shop",
        subscription="summarise",
        token=TOKEN,
        key=text,
        kept=found,
        error="",
        traceback="",
        attempts=0,
        place=Place(2, 7, 41, 5, 0),
        cause=FAILED,
    )
    encoded = bson.encode(letter)
    assert bson.decode(encoded)["_id"] == letter["_id"], "a client without options must be able to list dead letters"
    decoded = bson.decode(encoded, CodecOptions(document_class=RawBSONDocument))
    if found.kind == "name":
        assert is_unread(token_data(wrap_event(raw).token or {})), "only a stand-in has no more than its name"
    else:
        assert raw == (unpack_event(decoded) if found.kind == "bytes" else decoded["change"].raw)


@given(values)
def test_a_description_takes_any_value(value: Any) -> None:
    """As a dict too, which is how unit tests of users give events."""
    for change in ({"documentKey": {"_id": value}}, {"documentKey": value}, {"ns": value}, {"operationType": value}):
        assert len(describe(change)) <= DESCRIPTION_CHARS
        read_namespace(change)


@settings(max_examples=150)
@given(valid)
def test_the_partition_of_an_event_that_was_always_readable_is_what_it_was(raw: bytes) -> None:
    """P1: stored positions depend on it."""
    try:
        expected = partition_hash(document_key(RawBSONDocument(raw, BEFORE)))
    except Exception:  # noqa: BLE001 - what did not work then has no partition to keep
        return
    assert document_hash(wrap_event(raw)) == expected


EQUAL = [
    st.sampled_from([1, 1.0, Int64(1), Decimal128("1"), Decimal128("1.00")]),
    st.sampled_from([0, 0.0, -0.0, Decimal128("-0")]),
    st.sampled_from([float("nan"), Decimal128("NaN"), Decimal128("-NaN")]),
    st.sampled_from([float("inf"), Decimal128("Infinity")]),
]


@given(st.sampled_from(EQUAL).flatmap(lambda equal: st.lists(equal, min_size=2, max_size=2)), names)
def test_equal_keys_share_a_partition_also_beside_text_that_is_no_utf8(pair: list[Any], name: str) -> None:
    """P2: `_id: 1` and `_id: 1.0` are one document, alone and inside one that cannot be decoded strictly."""
    one, other = (
        bson.encode({"ns": {"db": "shop", "coll": "orders"}, "documentKey": {"_id": {name: value, "bad": "????"}}})
        for value in pair
    )
    for spoil in (b"????", b"\xff\xfe\x80\xff"):
        hashes = {document_hash(wrap_event(raw.replace(b"????", spoil))) for raw in (one, other)}
        assert len(hashes) == 1
    assert id_key(pair[0], EVENT_TYPES) == id_key(pair[1], EVENT_TYPES)


# -- fields that are read from their own place -----------------------------------------------------

FIELDS = ("_id", "operationType", "clusterTime", "ns", "documentKey", "to", "fullDocument", "title", "_data", "")
ID = ObjectId("0123456789abcdef01234567")


def said(look: Any) -> tuple[str, object]:
    """What a look gives, comparable whatever it is: bytes of the value, or the kind of the error."""
    try:
        found = look()
    except Exception as error:  # noqa: BLE001 - of a decoder, whatever bytes do to it
        return "error", type(error)
    kind = type(found).__name__.replace("RawEvent", "RawBSONDocument")
    try:
        return kind, bson.encode({"": found})
    except InvalidDocument:  # `dict` has made keys of an array's pairs
        return kind, repr(found)


def same(one: RawEvent | RawBSONDocument, other: RawBSONDocument) -> None:
    for name in FIELDS:
        assert said(lambda name=name: one.get(name)) == said(lambda name=name: other.get(name))
        assert said(lambda name=name: one[name]) == said(lambda name=name: other[name])
        assert said(lambda name=name: name in one) == said(lambda name=name: name in other)
    assert said(lambda: list(one)) == said(lambda: list(other))
    assert said(lambda: list(one.keys())) == said(lambda: list(other.keys()))
    assert said(lambda: len(one)) == said(lambda: len(other))
    assert said(lambda: dict(one)) == said(lambda: dict(other))
    assert said(lambda: one.get("absent", 7)) == said(lambda: other.get("absent", 7))
    if isinstance(one, RawEvent):  # a document in one that was odd is not
        assert said(lambda: one.token) == said(lambda: None if other.get("_id") is None else dict(other["_id"]))
        if one.plain is not None:
            assert (one.plain.token, one.plain.cluster_time) == (other["_id"]["_data"], other["clusterTime"])
    assert one.raw == other.raw


@given(valid, st.sampled_from(FIELDS), values, names)
def test_a_value_that_looks_like_our_fields_is_none_of_them(raw: bytes, name: str, value: Any, other: str) -> None:
    """Not at depth, not inside a text, not in binary data: a walk goes by lengths, and searches for nothing."""
    looks = bson.encode({name: value, "_id": {"_data": "forged"}, "operationType": "delete", "ns": {"db": "forged"}})
    around = {"before": looks, "within": bson.decode(looks, EVENT_TYPES), "text": looks.hex() + "\0ns\0_id\0", other: 1}
    whole = bson.encode({**around, "list": [dict(around)], **RawBSONDocument(raw, EVENT_TYPES), "behind": looks})
    same(RawEvent(whole), RawBSONDocument(whole, EVENT_TYPES))


places_of_changes = st.fixed_dictionaries(
    {"db": st.sampled_from(["shop", "other"]), "coll": st.sampled_from(["orders", "lines"])}
)


looked_at = st.fixed_dictionaries(
    {},
    optional={
        "operationType": st.sampled_from(["insert", "update", "delete", "drop", "rename"]) | values,
        "ns": places_of_changes | values,
        "to": places_of_changes | values,
        "documentKey": st.just({"_id": 1}) | values,
        "updateDescription": st.fixed_dictionaries({"updatedFields": st.dictionaries(names, values, max_size=1)}),
    },
)


@settings(max_examples=150)
@given(
    st.lists(looked_at, min_size=2, max_size=6),
    st.sampled_from([Filter(), Filter(operations=frozenset({"insert", "rename"})), Filter(fields=frozenset({"a"}))]),
    st.sampled_from([Source("shop", "orders"), Source("shop", None), Source(None, None)]),
)
def test_who_gets_an_event_does_not_depend_on_those_before_it(
    events: list[dict[str, Any]], chosen: Filter, source: Source
) -> None:
    """P12: a selector is asked once about changes of one operation and namespace, and would say the same of each."""
    selector = Selector("summarise", (source,), chosen)
    admission = Admission(selector, partitioner(None, None, None), Layout(0, 16, "blake2b-64:_id"), {})
    for fields in [*events, *events]:
        raw = bson.encode(fields)
        event = ChangeEvent(mark(1), RawEvent(raw), raw)
        found = admission.admit(event)
        try:
            expected, reason = selector.selects(RawBSONDocument(raw, EVENT_TYPES)), None
        except Exception as error:  # noqa: BLE001 - it is refused then
            expected, reason = True, error
        assert (found is not None) == expected
        assert (found is not None and found.refusal is not None) == (reason is not None)


tokens = st.text("0123456789ABCDEFabcdef", max_size=40) | names
operations = st.sampled_from(["insert", "update", "replace", "delete", "snapshot"]) | names


EXPANDED = [("collectionUUID", BSON_VALUES["uuid"])]
SESSION = {"id": BSON_VALUES["uuid"], "uid": bytes(32)}
LAST = "fullDocumentBeforeChange"
IN_A_TRANSACTION: list[tuple[str, Any]] = [("txnNumber", Int64(7)), ("lsid", SESSION)]


@st.composite
def usual(draw: st.DrawFn) -> bytes:
    """An event of the usual form, or nearly: something left out, put in, doubled or moved."""
    fields = [
        *draw(st.sampled_from([[], [], IN_A_TRANSACTION, [*IN_A_TRANSACTION[:1], ("lsid", draw(documents))]])),
        ("_id", {"_data": draw(tokens), **draw(st.sampled_from([{}, {}, {"_typeBits": b"\x40"}]))}),
        ("operationType", draw(operations)),
        ("clusterTime", draw(st.builds(Timestamp, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))),
        *draw(st.sampled_from([[], [], EXPANDED])),
        ("wallTime", BSON_VALUES["datetime"]),
        ("fullDocument", draw(documents | st.none())),
        ("ns", draw(places_of_changes | documents)),
        ("documentKey", draw(st.just({"_id": ID}) | documents)),
        ("updateDescription", draw(documents)),
        *draw(st.sampled_from([[], [(LAST, draw(documents))]])),
    ]
    left_out = draw(st.sampled_from(["", "", "wallTime", "fullDocument", "updateDescription"]))
    elements = [bson.encode({name: value})[4:-1] for name, value in fields if name != left_out]
    how, at = draw(st.sampled_from(["", "", "left out", "put in", "doubled", "moved"])), draw(st.integers(0, 6))
    if how == "left out":
        del elements[at]
    elif how == "put in":
        elements.insert(at, bson.encode({draw(names | st.sampled_from(FIELDS)): draw(values)})[4:-1])
    elif how == "doubled":
        elements.insert(at, draw(st.sampled_from(elements)))
    elif how == "moved":
        elements.insert(at, elements.pop(draw(st.integers(0, len(elements) - 1))))
    return join(*elements)


def decoded_event(raw: bytes) -> RawEvent:
    event = RawEvent(raw)
    event.plain = None
    return event


@settings(max_examples=400)
@given(raws | usual() | spoilt(usual()))
@example(bson.encode({"_id": [[None, None]]}))
def test_an_event_looks_as_if_it_were_decoded_whole(raw: bytes) -> None:
    """P12, P2: whatever bytes it has, whether it is recognised or not, and however nearly it is of the usual form."""
    looks_decoded(raw)


def looks_decoded(raw: bytes) -> None:
    try:
        decoded = RawBSONDocument(raw, EVENT_TYPES)
    except Exception as error:  # noqa: BLE001 - no document at all
        with pytest.raises(type(error)):
            RawEvent(raw)
        return
    same(RawEvent(raw), decoded)
    same(RawEvent(memoryview(raw)), decoded)
    for name in ("_id", "ns", "documentKey"):
        if said(lambda name=name: decoded[name])[0] == "RawBSONDocument":
            same(RawEvent(raw)[name], decoded[name])
    if read_plain(raw) is not None:
        slow = decoded_event(raw)
        assert (RawEvent(raw).origin, RawEvent(raw).object_id) == (slow.origin, slow.object_id)
        assert document_hash(RawEvent(raw)) == document_hash(decoded)


def make_usual(operation: str, left_out: tuple[str, ...], more: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {
        **dict(IN_A_TRANSACTION),
        "_id": {"_data": "826553F1A4000000012B022C0100296E5A1004"},
        "operationType": operation,
        "clusterTime": Timestamp(1700000164, 1),
        **dict(EXPANDED),
        "wallTime": BSON_VALUES["datetime"],
        "fullDocument": {"_id": ID} if operation != "delete" else None,
        "ns": {"db": "shop", "coll": "orders"},
        "documentKey": {"_id": ID},
        "updateDescription": {"updatedFields": {"a": 1}, "removedFields": []},
        LAST: {"_id": ID},
    }
    absent = {*left_out, *dict(EXPANDED + IN_A_TRANSACTION)} - dict(more).keys()
    if operation != "update":
        absent.add("updateDescription")
    return {name: value for name, value in fields.items() if name not in absent}


def document(fields: dict[str, Any]) -> bytes:
    """A document whose fields stay in this order: `encode` moves `_id`."""
    return join(*(bson.encode({name: value})[4:-1] for name, value in fields.items()))


def join(*elements: bytes) -> bytes:
    body = b"".join(elements) + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


@pytest.mark.parametrize("operation", ["insert", "update", "replace", "delete", "snapshot"])
@pytest.mark.parametrize("more", [[], EXPANDED, IN_A_TRANSACTION], ids=["plain", "expanded", "in a transaction"])
@pytest.mark.parametrize(
    "left_out",
    [("wallTime", "fullDocument", LAST), ("fullDocument",), ("wallTime",), ()],
    ids=len,
)
def test_the_usual_form_is_recognised(left_out: tuple[str, ...], more: list[tuple[str, Any]], operation: str) -> None:
    """As servers send inserts, updates with and without a look-up, replaces and deletes."""
    whole = make_usual(operation, left_out, more)
    raw, longer = document(whole), document({**whole, "number": 7})
    event = RawEvent(raw)
    assert event.token == whole["_id"]
    assert event.plain is not None
    assert (event.plain.token, event.plain.cluster_time) == (whole["_id"]["_data"], whole["clusterTime"])
    assert event.object_id == (bson.encode(whole["ns"]), ID.binary)
    looks_decoded(raw)
    assert read_plain(longer) is None
    looks_decoded(longer)
