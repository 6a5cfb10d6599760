"""The signed envelope: exact for what it carries, closed to everybody without the key (P11)."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import bson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.window import Refusal
from mongo_celery.bridge.worker.envelope import Carrier, Envelope, Run, sign_run
from mongo_celery.errors import InvalidEnvelopeError
from tests.fixtures.samples import BSON_VALUES, event, first_token, verify_run

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
    """Numbers of 64 bits, names and changes come out as they went in."""
    sealed = sign_run(kind, run, key)
    assert verify_run(kind, sealed, key) == run
    assert Envelope(sealed).bridge == run.bridge


@pytest.mark.parametrize("raw", [EVENTS[0], b"", b"\x00", b"\x00" * 4, b"\xff" * 9], ids=repr)
def test_a_refused_change_travels_alone_with_its_reason_and_its_token(raw: bytes) -> None:
    """P12: its bytes as they are, also where they are no event."""
    run = replace(RUN, changes=(raw,), last=41, refusal=Refusal("because", halts=True), token={"_data": "82"})
    assert verify_run("run", sign_run("run", run, KEY), KEY) == run


def test_a_run_commits_itself_where_it_is_signed_that_nothing_follows() -> None:
    """P11: nobody can take a link away."""
    alone, followed = Carrier.of("id", None), Carrier.of("id", [{"task": "mongo_celery.commit"}])
    found = [verify_run("run", sign_run("run", replace(RUN, carrier=each), KEY), KEY) for each in (alone, followed)]
    assert [run.is_inline for run in found] == [True, False]
    assert not replace(RUN, carrier=alone, changes=(), dead_letter="a letter").is_inline


REFERRING = replace(RUN, changes=(), hash=2**64 - 1, stored=("82", "83"))


@pytest.mark.parametrize("refused", [{}, {"refusal": Refusal("because", halts=True), "token": {"_data": "82"}}])
def test_a_run_of_stored_changes_travels_by_their_tokens(refused: dict[str, Any]) -> None:
    """Whatever its changes weigh: none of their bytes are in the message."""
    run = replace(REFERRING, **refused)
    sealed = sign_run("run", run, KEY)
    assert verify_run("run", sealed, KEY) == run
    assert first_token(run) == "82"
    assert all(event not in base64.b64decode(sealed) for event in EVENTS)


@pytest.mark.parametrize("refused", [{}, {"refusal": Refusal("no", halts=False), "token": {"_data": "82"}}])
def test_a_run_beside_parked_keys_carries_the_hashes_of_all_its_keys(refused: dict[str, Any]) -> None:
    """P2: a worker stops before each of them that is parked."""
    changes = EVENTS[:1] if refused else EVENTS
    run = replace(REFERRING, stored=(), changes=tuple(changes), hashes=(2**64 - 5,) * len(changes), **refused)
    sealed = sign_run("run", run, KEY)
    assert verify_run("run", sealed, KEY) == run
    assert [run.find_hash(place) for place in range(len(changes))] == [2**64 - 5] * len(changes)


@given(st.integers(0, len(base64.b64decode(SEALED)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(position: int, difference: int) -> None:
    """P11: in the signature, in a number or in a change."""
    data = bytearray(base64.b64decode(SEALED))
    data[position] ^= difference
    with pytest.raises(InvalidEnvelopeError):
        verify_run("run", base64.b64encode(data).decode(), KEY)


def test_an_envelope_of_another_installation_is_refused() -> None:
    """P11: two installations may share a broker, and a state database may have been made anew."""
    with pytest.raises(InvalidEnvelopeError):
        verify_run("run", SEALED, OTHER_KEY)


@pytest.mark.parametrize(("sealed_as", "opened_as"), [("run", "commit"), ("commit", "run")])
def test_a_message_of_one_kind_cannot_be_replayed_as_another(sealed_as: str, opened_as: str) -> None:
    """P11: the kind is signed; a commit that was overheard starts no handler, and the reverse."""
    with pytest.raises(InvalidEnvelopeError):
        verify_run(opened_as, sign_run(sealed_as, RUN, KEY), KEY)


@pytest.mark.parametrize(
    "argument",
    [
        None,
        7,
        1.5,
        True,
        b"",
        SEALED.encode(),
        [SEALED],
        {"envelope": SEALED},
        "",
        "=",
        "é",
        "\ud800",
        "not base64",
        "AAAA",
    ],
    ids=repr,
)
def test_an_argument_that_is_no_envelope_is_refused(argument: object) -> None:
    """P11: whatever else arrives in a partition's queue."""
    for attempt in (lambda: verify_run("run", argument, KEY), lambda: Envelope(argument).bridge):
        with pytest.raises(InvalidEnvelopeError):
            attempt()


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_before_they_are_trusted(data: bytes) -> None:
    """P11: the bridge's name is read before the signature is checked, so decoding must not fail otherwise."""
    text = base64.b64encode(bytes(SIGNATURE_BYTES) + data).decode()
    for attempt in (lambda: verify_run("run", text, KEY), lambda: Envelope(text).bridge):
        with pytest.raises(InvalidEnvelopeError):
            attempt()
