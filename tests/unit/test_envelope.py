"""The signed envelope: exact for what it carries, closed to everybody without the key (P11)."""

from __future__ import annotations

import base64
from dataclasses import replace
from random import Random

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.worker.envelope import Carrier, Envelope, Run, sign_run
from mongo_celery.errors import InvalidEnvelopeError
from tests.fixtures.samples import BSON_VALUES, event, verify_run

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
EVENTS = tuple(bson.encode(event(fullDocument={"value": value})) for value in BSON_VALUES.values())
RUN = Run(
    "shop", "summarise", 2, 7, (1 << 20) * 1_700_000_000 + 3, 41, 41 + len(EVENTS) - 1, EVENTS, Carrier("id", "links")
)
SEALED = sign_run("run", RUN, KEY)
SIGNATURE_BYTES = 32

labels = st.text("AZaz09_-", min_size=1, max_size=64)
runs = st.builds(
    Run,
    labels,
    labels,
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**16),
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**62),
    st.integers(1, 2**62),
    st.lists(st.sampled_from(EVENTS), max_size=3).map(tuple),
    st.builds(Carrier, labels, labels),
)


@given(runs, st.sampled_from(["run", "commit"]), st.binary(min_size=1, max_size=64))
def test_what_was_sealed_is_unsealed(run: Run, kind: str, key: bytes) -> None:
    sealed = sign_run(kind, run, key)
    assert verify_run(kind, sealed, key) == run
    assert Envelope(sealed).bridge == run.bridge


@pytest.mark.parametrize("other_bytes", [0, 300])
def test_a_long_run_is_compressed_if_its_changes_are_alike(other_bytes: int) -> None:
    """Either way its changes come out as they went in."""
    draw = Random(1).randbytes
    changes = tuple(bson.encode(event(fullDocument={"n": n, "data": draw(other_bytes)})) for n in range(200))
    run = replace(RUN, changes=changes)
    sealed = sign_run("run", run, KEY)
    assert verify_run("run", sealed, KEY) == run
    assert (len(base64.b64decode(sealed)) < sum(map(len, changes)) / 2) is (other_bytes == 0)


def test_a_run_commits_itself_where_it_is_signed_that_nothing_follows() -> None:
    """P11: nobody can take a link away."""
    alone, followed = Carrier.of("id", None), Carrier.of("id", [{"task": "mongo_celery.commit"}])
    found = [verify_run("run", sign_run("run", replace(RUN, carrier=each), KEY), KEY) for each in (alone, followed)]
    assert [run.is_inline for run in found] == [True, False]
    assert not replace(RUN, carrier=alone, changes=(), dead_letter="a letter").is_inline


def test_a_message_of_the_old_key_is_accepted_beside_the_new_one() -> None:
    for keys in ([OTHER_KEY, KEY], [KEY, OTHER_KEY]):
        assert Envelope(SEALED).verify("run", keys) == RUN


@given(st.integers(0, len(base64.b64decode(SEALED)) - 1), st.integers(1, 255), st.binary(max_size=200))
def test_any_changed_byte_is_refused(position: int, difference: int, other: bytes) -> None:
    """P11: in the signature, in a number or in a change. The bridge's name is read before the signature is checked."""
    data = bytearray(base64.b64decode(SEALED))
    data[position] ^= difference
    with pytest.raises(InvalidEnvelopeError):
        verify_run("run", base64.b64encode(data).decode(), KEY)
    with pytest.raises(InvalidEnvelopeError):
        _ = Envelope(base64.b64encode(bytes(SIGNATURE_BYTES) + other).decode()).bridge


@pytest.mark.parametrize(
    ("sealed_as", "opened_as", "key"), [("run", "commit", KEY), ("commit", "run", KEY), ("run", "run", OTHER_KEY)]
)
def test_a_message_of_one_kind_cannot_be_replayed_as_another(sealed_as: str, opened_as: str, key: bytes) -> None:
    """P11: the kind is signed. Two installations may share a broker."""
    with pytest.raises(InvalidEnvelopeError):
        verify_run(opened_as, sign_run(sealed_as, RUN, KEY), key)


@pytest.mark.parametrize(
    "argument",
    [None, 7, True, SEALED.encode(), [SEALED], {"envelope": SEALED}, "", "é", "\ud800", "not base64", "AAAA"],
    ids=repr,
)
def test_an_argument_that_is_no_envelope_is_refused(argument: object) -> None:
    for attempt in (lambda: verify_run("run", argument, KEY), lambda: Envelope(argument).bridge):
        with pytest.raises(InvalidEnvelopeError):
            attempt()
