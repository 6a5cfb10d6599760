"""The mutants: which rule, where it is written, what stands there instead, and which tests fail then."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """
    A build with one rule broken.

    Args:
        promises: those that it breaks.
        rule: what it leaves out, as a sentence.
        file: where the rule is, in `mongo_celery`.
        old: the text of the rule, which is there once. `new` stands there instead.
        tests: each of them must fail.
    """

    promises: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PROMISES = {
    "P1": "no loss",
    "P2": "order",
    "P3": "fencing",
    "P4": "monotone positions",
    "P5": "prefix",
    "P6": "bounded duplicates",
    "P7": "bounded gap",
    "P8": "disposable broker",
    "P9": "loud errors",
    "P10": "the server's clock",
    "P11": "forged messages",
    "P12": "isolation",
    "P13": "what was read is not lost",
    "P14": "attribution",
    "P15": "one authority over errors of the stream",
    "P16": "truth",
    "P17": "liveness",
    "P18": "money",
}
"""Each has a mutant at least."""

_CLAIMS = "tests/integration/test_claims.py::"
_LEASES = "tests/integration/test_leases.py::"
_STORING = "tests/integration/test_storing.py::"
_STREAM = "tests/integration/test_stream.py::"
_HOLES = "tests/integration/test_twophase_holes.py::"
_UNREADABLE = "tests/integration/test_unreadable_events.py::"
_CONFORMANCE = "tests/integration/test_conformance.py::test_a_sound_build_stores_what_the_models_allow"

MUTANTS = (
    Mutant(
        "P1",
        "Of a list that fails in its middle, only what is before the failing change is done",
        "bridge/worker/subject.py",
        "        return self.run.first + end - 1, dict(self.read_token(end - 1))",
        "        end = len(self.run.changes)\n        return self.run.first + end - 1, dict(self.read_token(end - 1))",
        ("tests/integration/test_runs.py::test_every_change_is_done_or_has_a_letter_whichever_fail",),
    ),
    Mutant(
        "P1",
        "A marker moves the place of a stream without changes, so that its history is not lost",
        "bridge/stream/reader.py",
        "            else:\n                place = mark\n",
        "            elif not isinstance(item, Mark):\n                place = mark\n",
        (f"{_STREAM}test_a_marker_comes_only_behind_everything_that_was_read_and_can_be_resumed_from",),
    ),
    Mutant(
        "P1 P2",
        "A claim begins right behind what is committed",
        "bridge/state/claims.py",
        '"committed": first - 1,\n',
        "\n",
        (f"{_CLAIMS}test_a_claim_is_refused",),
    ),
    Mutant(
        "P2",
        "A live claim keeps others out",
        "bridge/state/claims.py",
        '_FREE: dict[str, Any] = {"$lte": ["$claim.until", "$$NOW"]}',
        '_FREE: dict[str, Any] = {"$literal": True}',
        (f"{_CLAIMS}test_a_live_claim_keeps_others_out_until_it_lapses", _CONFORMANCE),
    ),
    Mutant(
        "P3",
        "An outcome matches fencing token and owner",
        "bridge/state/claims.py",
        '        "fencingToken": claim.fencing_token,\n        "claim.owner": claim.owner,\n',
        "",
        (f"{_CLAIMS}test_an_outcome_is_refused_after_a_newer_claim", _CONFORMANCE),
    ),
    Mutant(
        "P3",
        "A fenced write is refused where a newer execution has written",
        "bridge/fenced/fence.py",
        '{"$not": {"$gt": self.token}}',
        '{"$not": {"$lt": 0}}',
        ("tests/integration/test_fenced_writes.py::test_a_stale_write_is_refused_and_changes_nothing",),
    ),
    Mutant(
        "P4",
        "A watermark grows only",
        "bridge/state/subscriptions.py",
        ', {"resumeToken._data": {"$lt": to.token["_data"]}}],',
        ', {"resumeToken": {"$ne": None}}],',
        ("tests/integration/test_partitions.py::test_a_watermark_only_grows",),
    ),
    Mutant(
        "P4",
        "Each claim raises the fencing token",
        "bridge/state/claims.py",
        '        self._next_token = next_number("fencingToken")',
        '        self._next_token = "$fencingToken"',
        (f"{_CLAIMS}test_every_claim_raises_the_fence_to_at_least_the_cluster_time", _CONFORMANCE),
    ),
    Mutant(
        "P5",
        "The watermark moves along the prefix that is done",
        "bridge/window.py",
        "        while order and order[0].done:\n            mark = order.popleft().mark",
        "        for item in [each for each in order if each.done]:\n"
        "            order.remove(item)\n            mark = item.mark",
        (_CONFORMANCE,),
    ),
    Mutant(
        "P6",
        "What is handled is not claimed again",
        "bridge/state/claims.py",
        'first - 1,\n                "handled": None,',
        "first - 1,",
        (f"{_CLAIMS}test_what_is_handled_cannot_be_claimed_again",),
    ),
    Mutant(
        "P7",
        "A release frees the lease immediately",
        "bridge/state/leases.py",
        '            "listenerId": REMOVED,\n            "expiresAt": REMOVED,\n            "state": state,',
        '            "state": state,',
        (f"{_LEASES}test_release_keeps_the_document_and_everything_in_it",),
    ),
    Mutant(
        "P8",
        "A run that nobody takes is sent again",
        "bridge/listener/partition.py",
        "        self._give_up()\n        self.is_repeated = True\n",
        "        return\n",
        (
            "tests/unit/test_partition.py::test_a_change_that_nobody_takes_for_a_year_is_still_dispatched",
            "tests/acceptance/test_broker_faults.py::test_lost_messages_are_dispatched_again",
        ),
    ),
    Mutant(
        "P8",
        "A dead worker's run is sent again while changes are stored",
        "bridge/listener/partition.py",
        '{"live", "due_in", "stored"}',
        '{"live", "due_in"}',
        ("tests/unit/test_partition.py::test_changes_that_are_stored_meanwhile_do_not_keep_a_run_waiting",),
    ),
    Mutant(
        "P9",
        "An error of the stream that does not pass ends it loudly",
        "bridge/stream/verdicts.py",
        "PASSING = frozenset({Verdict.TRANSIENT, Verdict.UNKNOWN})",
        "PASSING = frozenset(Verdict)",
        ("tests/integration/test_stream.py::test_a_final_error_ends_with_code_name_and_cure",),
    ),
    Mutant(
        "P10",
        "A lease is judged by the server's clock, not by that of a client an hour ahead",
        "bridge/state/leases.py",
        '        free = {"$lte": ["$expiresAt", "$$NOW"]}',
        '        free = {"$lte": ["$expiresAt", {"$add": ["$$NOW", 3_600_000]}]}',
        (f"{_LEASES}test_an_expired_lease_can_be_acquired_and_not_a_moment_before", _CONFORMANCE),
    ),
    Mutant(
        "P11",
        "A message without the bridge's signature is dropped",
        "bridge/worker/envelope.py",
        "            if hmac.compare_digest(signature, hmac.digest(key, body, hashlib.sha256)):",
        "            if signature and key and body:",
        ("tests/unit/test_envelope.py::test_any_changed_byte_is_refused",),
    ),
    Mutant(
        "P12",
        "An event that cannot be read is looked for, and concerns its own partition",
        "bridge/stream/verdicts.py",
        " and judge_stream_error(error, opening=False) in _ABOUT_AN_EVENT",
        " and judge_stream_error(error, opening=False) is None",
        (f"{_UNREADABLE}test_a_match_that_fails_leaves_the_flags_of_others",),
    ),
    Mutant(
        "P13",
        "What is blocked for long is stored",
        "bridge/listener/storing.py",
        "        return why if seconds >= self._options.spill_after and not waits else None",
        "        return None",
        (f"{_STORING}test_what_stands_is_stored_and_runs_in_order_when_it_is_retried",),
    ),
    Mutant(
        "P13",
        "A change that holds the watermark is stored before the oplog loses it, wherever it waits in its queue",
        "bridge/listener/storing.py",
        "oldest.index == partition.index",
        "oldest is partition.queue.first",
        (f"{_STORING}test_a_watermark_far_back_in_the_oplog_is_freed_of_a_change_behind_existing_documents",),
    ),
    Mutant(
        "P13 P5",
        "A mark is written behind what it promises",
        "bridge/listener/storing.py",
        "        self._state.backlog.insert(partition.partition_id, stored, self._version, self.session)\n",
        "",
        (f"{_STORING}test_what_is_read_again_holds_what_is_stored_behind_it",),
    ),
    Mutant(
        "P14",
        "A claim that lapses after its worker was told to end counts against nobody",
        "bridge/state/claims.py",
        '_CHARGED: dict[str, Any] = {"$and": [_REPLACED, {"$ne": ["$claim.leaving", True]}]}',
        "_CHARGED: dict[str, Any] = _REPLACED",
        (f"{_CLAIMS}test_the_lapse_of_a_claim_whose_worker_was_told_to_end_is_no_crash",),
    ),
    Mutant(
        "P15",
        "A stream that breaks again and again is opened with pauses",
        "bridge/stream/reader.py",
        "        return 0.0 if is_search or status.failures == 1 else self._pauses.nth(status.failures - 2)",
        "        return 0.0",
        ("tests/integration/test_stream.py::test_a_lasting_error_opens_the_stream_at_most_once_a_second",),
    ),
    Mutant(
        "P16",
        "A halted partition makes the verdict failing",
        "bridge/operations/judgement.py",
        "    if kept := [each for each in halted if each not in gone]:",
        "    if kept := [each for each in gone if each not in gone]:",
        ("tests/unit/test_verdict.py::test_a_reason_is_told_alone_with_its_severity_its_cost_and_its_command",),
    ),
    Mutant(
        "P17",
        "A leader that makes no progress gives the lease up",
        "bridge/listener/renewal.py",
        "            if seconds > self._patience:",
        "            if seconds < 0:",
        ("tests/integration/test_renewal.py::test_a_leader_that_makes_no_progress_gives_the_lease_up",),
    ),
    Mutant(
        "P18",
        "A participant is changed once for each transaction",
        "twophase/documents.py",
        '        MARKERS: {"$ne": transaction_id},\n        PARTICIPANT_VERSION: {"$eq": participant_version},\n',
        "",
        (f"{_HOLES}test_a_driver_that_was_overtaken_applies_nothing_again_and_leaves_nothing_half_applied",),
    ),
    Mutant(
        "P18",
        "A commit that the end of an event loop cancels is sent again",
        "mongo/transaction/attempts.py",
        "        if not (task.cancelled() and is_due()):\n            break\n",
        "        break\n",
        ("tests/integration/test_transaction_tasks.py::test_a_cancel_during_the_commit_waits_for_its_answer",),
    ),
)
