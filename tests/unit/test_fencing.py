"""The pure half of the fence: what it admits, what it leaves behind, how it rewrites a user's update."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.fenced.fence import Fence, Origin, merge, refuse_stamps
from mongo_celery.errors import ConfigurationError, OutdatedChangeError, StaleFencingTokenError
from mongo_celery.mongo.writes import Operators, Pipeline, Replacement

KEY = "shop/summarise"
small = st.integers(0, 3)
fences = st.builds(Fence, st.sampled_from([KEY, "shop/other"]), small, small, small)
origins = st.builds(Origin, st.integers(0, 1), st.sampled_from([b"1", b"2", b"3"]), small)
moving = st.builds(Fence, st.just(KEY), st.integers(0, 1), small, small, origins)


def _written(writers: list[Fence]) -> dict[str, Any]:
    stamps: dict[str, Any] = {}
    for fence in writers:
        if fence.admits(stamps):
            stamps = fence.stamp(stamps)
    return stamps


def _not_smaller(after: dict[str, Any], before: dict[str, Any]) -> bool:
    for key, entry in before.items():
        now = after[key]
        if now["g"] < entry["g"]:
            return False
        if now["g"] == entry["g"] and any(now["p"][i] < token for i, token in entry["p"].items()):
            return False
    return True


@given(st.lists(fences | moving), fences | moving)
def test_a_write_never_takes_any_stamp_back(writers: list[Fence], fence: Fence) -> None:
    """P4, F2-F4: after an admitted write every key and partition stands at least where it stood."""
    before = _written(writers)
    if fence.admits(before):
        after = fence.stamp(before)
        assert _not_smaller(after, before)
        assert fence.has_token(after)
        assert {k: v for k, v in after.items() if k != fence.key} == {k: v for k, v in before.items() if k != fence.key}
    else:
        with pytest.raises((StaleFencingTokenError, OutdatedChangeError)):
            fence.stamp(before)


@given(st.lists(fences | moving), fences | moving, fences | moving)
def test_once_a_newer_one_has_written_an_older_one_is_refused(
    writers: list[Fence], first: Fence, second: Fence
) -> None:
    """P3, F1: in one partition, a smaller token is refused from then on; an equal one is admitted."""
    before = _written(writers)
    if second.admits(before):
        after = second.stamp(before)
        assert second.admits(after)
        if (first.key, first.partitioning, first.index) == (second.key, second.partitioning, second.index):
            assert first.admits(after) == (first.token >= second.token)
        if first.key == second.key and first.partitioning < second.partitioning:
            assert not first.admits(after)


@given(st.lists(fences), st.lists(fences), fences)
def test_a_merge_refuses_whatever_either_side_refuses(left: list[Fence], right: list[Fence], fence: Fence) -> None:
    """P3, T2: a tombstone merged from a document and an older tombstone forgets nothing that still counts."""
    first, second = _written(left), _written(right)
    merged = merge(first, second)
    assert merged == merge(second, first)
    assert fence.admits(merged) == (fence.admits(first) and fence.admits(second))


@given(st.lists(moving))
def test_no_older_change_of_a_document_follows_a_newer_one(writers: list[Fence]) -> None:
    """P2, F5: in one layout, whatever partitions they are in; within a partition the tokens decide."""
    stamps: dict[str, Any] = {}
    last: Fence | None = None
    for fence in writers:
        assert fence.origin is not None
        if not fence.admits(stamps):
            continue
        stamps = fence.stamp(stamps)
        if last is not None and last.origin is not None and last.partitioning == fence.partitioning:
            is_known = last.index != fence.index and last.token >= fence.origin.since
            if is_known and last.origin.document == fence.origin.document:
                assert fence.origin.place >= last.origin.place
        last = fence


@pytest.mark.parametrize(
    "given",
    [
        *((key, 0, 0, 0) for key in ("shop", "shop/a.b", "$shop/a", "shop/", "/a", "a/b/c")),
        *((KEY, -1, 0, 0), (KEY, 0, -1, 0), (KEY, 0, 0, -1), (KEY, 0, 0, 2**63)),
    ],
)
def test_a_fence_that_a_store_cannot_compare_is_refused(given: tuple[str, int, int, int]) -> None:
    """P9: `a.b` would stamp another field than the guard reads. A token beyond 64 bits would fail in the store."""
    with pytest.raises(ConfigurationError):
        Fence(*given)


@pytest.mark.parametrize(
    "write",
    [
        Operators({"$set": {"_fence": {}}}),
        Operators({"$unset": {"_fence.shop/summarise": ""}}),
        Operators({"$rename": {"a": "_fence"}}),
        Pipeline([{"$set": {"_fence": 1}}]),
        Pipeline([{"$unset": ["a", "_fence.x"]}]),
        Pipeline([{"$project": {"_fence": 0}}]),
        Pipeline([{"$replaceRoot": {"newRoot": {"_fence": 1}}}]),
        Replacement({"_id": 1, "_fence": {}}),
    ],
)
def test_a_users_write_to_the_stamps_is_refused(write: Any) -> None:
    """P4: it could take the fence back; a document that was read and is written back brings old stamps."""
    with pytest.raises(ConfigurationError):
        refuse_stamps(write)
