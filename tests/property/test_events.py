"""Whatever bytes an event has, valid BSON or not: it gets through key, label, filter, envelope and dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
from bson import Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mongo_celery.bridge.change import FLAGS, describe, read_namespace, token_data, wrap_event
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.partitioning import document_hash, document_key, partition_hash, partitioner
from mongo_celery.bridge.raw_event import EVENT_TYPES
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
