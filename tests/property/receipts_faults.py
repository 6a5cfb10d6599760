"""What befalls a transaction with receipts: deadlines, purges, replacements, and actors that die."""

from __future__ import annotations

from tests.property.receipts_model import Broken, State, Step, Steps, World, acted, changed


def pass_deadline(world: World, state: State) -> Steps:
    """The clock of a cluster passes the deadline; the others may be earlier or later."""
    if not world.late:
        return
    if not state.log_past:
        yield Step("the log's clock passes the deadline", fair=False), state._replace(log_past=True)
    for branch, is_past in enumerate(state.past):
        if not is_past:
            past = (*state.past[:branch], True, *state.past[branch + 1 :])
            yield Step("the clock passes the deadline", branch=branch, fair=False), state._replace(past=past)


def purge(world: World, state: State) -> Steps:
    """A receipt that expires is removed, after its own cluster's clock has passed the deadline (rule 3)."""
    for branch, receipt in enumerate(state.receipts):
        due = state.past[branch] or world.broken is Broken.PURGED_BEFORE_DEADLINE
        if receipt is not None and receipt.expires and due:
            yield Step("the receipt is purged", branch=branch, fair=False), changed(state, branch, None)


def replace(world: World, state: State) -> Steps:
    """Somebody writes a participant back whole: its change stays, what the transaction had left in it does not."""
    if not world.replaced or state.replaced:
        return
    for branch in range(world.remote):
        after = state._replace(replaced=True)  # beside the document nothing of ours is lost
        if world.broken is Broken.RECEIPT_IN_DOCUMENT:
            after = changed(after, branch, None)
        yield Step("a participant is replaced", branch=branch, fair=False), after


def die(world: World, state: State) -> Steps:
    """A process ends between two commands."""
    if state.kills < world.kills:
        for actor in dict.fromkeys(state.actors):
            yield Step("dies", actor, fair=False), acted(state, actor, None)._replace(kills=state.kills + 1)
