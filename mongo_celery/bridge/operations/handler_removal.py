"""The removal of all stored state of a deleted handler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mongo_celery.bridge.fenced.fence import FIELD
from mongo_celery.bridge.operations.acts import Act, reached, refuse_unknown
from mongo_celery.bridge.operations.resets import leader_in
from mongo_celery.bridge.state.subscriptions import parse_name
from mongo_celery.errors import CommandRefusedError
from mongo_celery.plan import Plan, PlanResult
from mongo_celery.quantities import number

_NOUNS = {"stored": "documents of changes", "dead_letters": "dead letters"}


def plan_remove(act: Act, handler: str, *, dead_letters: bool, stamps: Sequence[str]) -> Plan:
    """Plan to remove all stored state of a handler, as in `Operations.remove`."""
    wiring = act.wiring
    if handler in {each.name for each in wiring.handlers}:
        raise CommandRefusedError(
            f"{handler} is still a handler of this app, so it is not removed. Delete the function from the code, but "
            "keep the bridge. Then repeat the command.",
        )
    for each in stamps:
        if not all(each.partition(".")):
            raise CommandRefusedError(
                f"--stamps {each} must be DATABASE.COLLECTION, for example --stamps shop.invoices"
            )
    with reached(wiring) as store:
        leader = leader_in(store.leases.read() or {})
        known = {parse_name(document) for document in store.subscriptions.read_all()}
        holdings = store.positions.holdings(handler)
    counts = asdict(holdings)
    counts["dead_letters"] = counts.pop("letters")
    if handler not in known and not holdings.any and not stamps:  # otherwise a part may be left
        raise refuse_unknown(wiring, handler, known)
    if holdings.letters and not dead_letters:
        raise CommandRefusedError(
            f"{handler} still has {number(holdings.letters, 'dead letter', 'dead letters')}, so it is not removed. "
            f"Look at them with `{act.line.changes('dead-letters', 'list', handler)}`. To remove them as well, repeat "
            "the command with --dead-letters.",
        )

    def run(running: Act) -> PlanResult:
        store = wiring.store
        term = store.positions.forget(handler, running.record(handler, **counts))
        if term is None:
            raise CommandRefusedError(
                f"The running listener ({leader or 'it has just started'}) still has {handler}, so nothing is removed. "
                "Deploy the code without the handler to it, then repeat the command.",
            )
        stamp = f"{FIELD}.{wiring.name}/{handler}"
        for namespace in stamps:
            database, _, collection = namespace.partition(".")
            targets = wiring.client[database][collection]
            targets.update_many({stamp: {"$exists": True}}, {"$unset": {stamp: ""}})
        removed = sum(store.positions.remove(handler, term, letters=dead_letters))
        return PlanResult(lines=[f"{handler}: removed"], fields={"removed": removed})

    return act.plan(
        [f"{handler} has stored: {', '.join(f'{count} {_NOUNS.get(name, name)}' for name, count in counts.items())}"],
        run,
        {"handler": handler, "leader": leader, **counts},
        question="Remove all of it permanently?",
        seen=" ".join(f"{name}:{count}" for name, count in counts.items()),
    )
