"""What drivers and cancelers do: each command is one step, and what follows from its answer is where they go on."""

from __future__ import annotations

from tests.property.receipts_model import (
    Actor,
    At,
    Broken,
    Log,
    Mark,
    Own,
    Receipt,
    State,
    Step,
    Steps,
    World,
    acted,
    changed,
    renewed,
)


def act(world: World, state: State, actor: Actor) -> Steps:
    """Yield what an actor may do next."""
    rules = {
        At.READ: read,
        At.LOOK: look,
        At.APPLY: apply,
        At.PROVE: prove,
        At.CHANGE: change,
        At.APPLIED: applied,
        At.SETTLE: settle,
        At.DONE: done,
        At.CANCEL: cancel,
        At.DECIDE: decide,
        At.FORWARD: forward,
        At.UNDO: undo,
        At.REVERT: revert,
        At.CANCELED: canceled,
    }
    yield from rules[actor.at](world, state, actor)


def to(state: State, actor: Actor, at: At | None, place: int = 0, seen: int = 0) -> State:
    """Return the state with an actor about to send another command; None: it has ended."""
    return acted(state, actor, None if at is None else actor._replace(at=at, place=place, seen=seen))


def told(state: State, *what: Log) -> State:
    """Return the state with a caller told."""
    return state._replace(told=state.told | set(what))


def read(world: World, state: State, actor: Actor) -> Steps:
    """Rule 7: drive from what the log says; what has missed the deadline cancels itself (rule 6)."""
    log = state.log
    if log is Log.PENDING:
        late = At.CANCEL if world.decider is None else At.LOOK
        after = to(state, actor, At.CANCEL if actor.cancels else late if state.log_past else At.APPLY)
    elif log is Log.APPLIED:
        after = to(told(state, Log.DONE), actor, At.SETTLE)
    elif log is Log.CANCELING:
        after = to(state, actor, undoing(world))
    else:
        after = to(told(state, log), actor, None)
    yield Step(f"reads {log}", actor), after


def look(world: World, state: State, actor: Actor) -> Steps:
    """What was decided before the deadline, and was not said in the log, goes on; the rest cancels itself."""
    branch = 0 if world.broken is Broken.LATE_ASKS_FIRST else world.remote - 1
    found = state.receipts[branch]
    if found is not None and found.mark is Mark.APPLIED:
        yield Step("finds it decided", actor, branch), to(told(state, Log.DONE), actor, At.APPLIED)
    else:
        yield Step("finds it undecided", actor, branch), to(state, actor, At.CANCEL)


def undoing(world: World) -> At:
    """Return what a cancel begins with (rule 5)."""
    asks = world.decider is not None and world.broken is not Broken.DECIDER_UNASKED
    return At.DECIDE if asks else At.UNDO if world.undone else At.CANCELED


def apply(world: World, state: State, actor: Actor) -> Steps:
    """Rule 1: the receipt and the changes in one local transaction, before the deadline."""
    branch = actor.place
    found = state.receipts[branch]
    if found is not None:
        then = went_on(world, state, actor) if found.mark is Mark.APPLIED else to(state, actor, At.READ)
        yield Step(f"finds the receipt {found.mark}", actor, branch), then
        return
    if branch in world.marked:
        next_ = At.CHANGE if world.broken is Broken.MARKED_UNPROVED else At.PROVE
        yield Step("finds no marker", actor, branch), to(state, actor, next_, branch, state.versions[branch])
        return
    if world.broken is Broken.RECEIPT_OUTSIDE:
        yield Step("finds no receipt", actor, branch), to(state, actor, At.CHANGE, branch)
        return
    yield from change(world, state, actor)


def prove(world: World, state: State, actor: Actor) -> Steps:
    """Rule 8: what was seen counts only if the transaction was still pending after that."""
    del world
    if state.log is Log.PENDING:
        yield Step("proves it pending", actor), to(state, actor, At.CHANGE, actor.place, actor.seen)
    else:
        yield Step(f"cannot prove it pending: {state.log}", actor), to(state, actor, At.READ)


def change_marked(world: World, state: State, actor: Actor) -> Steps:
    """Rule 8: the change and the marker, where the version is the one that was seen, and there is no marker."""
    branch = actor.place
    as_seen = state.versions[branch] == actor.seen or world.broken is Broken.MARKED_UNSEEN
    if state.receipts[branch] is not None or not as_seen:
        yield Step("finds it changed meanwhile", actor, branch), to(state, actor, At.APPLY, branch)
        return
    yield Step("applies", actor, branch), went_on(world, changed(state, branch, Receipt(Mark.APPLIED), 1), actor)
    if branch in world.refusing:
        yield Step("is refused", actor, branch, fair=False), to(state, actor, At.CANCEL)


def change(world: World, state: State, actor: Actor) -> Steps:
    """The local transaction of an apply."""
    branch = actor.place
    if branch in world.marked:
        yield from change_marked(world, state, actor)
        return
    if state.past[branch] and world.broken is not Broken.NO_DEADLINE:
        yield Step("is too late", actor, branch), to(state, actor, At.CANCEL)
        return
    receipt = Receipt(Mark.APPLIED, expires=world.broken is Broken.TTL_FROM_CREATION)
    yield Step("applies", actor, branch), went_on(world, changed(state, branch, receipt, 1), actor)
    if branch in world.refusing:
        yield Step("is refused", actor, branch, fair=False), to(state, actor, At.CANCEL)


def went_on(world: World, state: State, actor: Actor) -> State:
    """Return the state after a branch is known to be applied."""
    if world.broken is Broken.RELEASED_EARLY:
        state = told(state, Log.DONE)
    if actor.place + 1 < world.remote:
        return to(state, actor, At.APPLY, actor.place + 1)
    if world.decider is not None:
        state = told(state, Log.DONE)  # its receipt decides: the caller is released
    early = world.broken is Broken.SETTLED_BEFORE_APPLIED and world.decider is not None
    return to(state, actor, At.SETTLE if early else At.APPLIED)


def applied(world: World, state: State, actor: Actor) -> Steps:
    """Rules 4 and 5: pending becomes applied, with the own branch where that is the last."""
    if world.own is Own.LAST and world.remote in world.refusing and state.log is Log.PENDING:
        yield Step("is refused by the own branch", actor, fair=False), to(state, actor, At.CANCEL)
    if world.broken is Broken.OWN_LAST_UNGUARDED and world.own is Own.LAST and state.log is not Log.PENDING:
        yield Step("changes the own branch", actor), to(state._replace(own=state.own + 1), actor, At.READ)
    elif state.log is Log.PENDING:
        state = state._replace(log=Log.APPLIED, own=state.own + (world.own is Own.LAST))
        yield Step("says applied", actor), to(told(state, Log.DONE), actor, At.SETTLE)
    else:
        then = At.SETTLE if world.broken is Broken.SETTLED_UNASKED else At.READ
        yield Step(f"cannot say applied: {state.log}", actor), to(state, actor, then)


def settle(world: World, state: State, actor: Actor) -> Steps:
    """Rules 3 and 5: expiry only after applied is durable; the decider's receipt at last."""
    branch = world.settled[actor.place]
    found = state.receipts[branch]
    if found is not None and branch in world.marked:
        state = renewed(changed(state, branch, None), branch)
    elif found is not None:
        state = changed(state, branch, found._replace(expires=True))
    more = actor.place + 1 < world.remote
    yield Step("settles", actor, branch), to(state, actor, At.SETTLE if more else At.DONE, (actor.place + 1) * more)


def done(world: World, state: State, actor: Actor) -> Steps:
    """Applied becomes done."""
    early = world.broken is Broken.SETTLED_BEFORE_APPLIED and state.log is Log.PENDING
    if state.log is Log.APPLIED or early:
        yield Step("says done", actor), to(state._replace(log=Log.DONE), actor, None)
    else:
        yield Step(f"cannot say done: {state.log}", actor), to(state, actor, At.READ)


def cancel(world: World, state: State, actor: Actor) -> Steps:
    """Pending becomes canceling."""
    if state.log is Log.PENDING:
        yield Step("says canceling", actor), to(state._replace(log=Log.CANCELING), actor, undoing(world))
    else:
        yield Step(f"cannot say canceling: {state.log}", actor), to(state, actor, At.READ)


def decide(world: World, state: State, actor: Actor) -> Steps:
    """Rule 5: the decider is asked, and never reverted."""
    branch = world.remote - 1
    found = state.receipts[branch]
    if found is not None and found.mark is Mark.APPLIED:
        stands = world.broken is Broken.CANCEL_STANDS
        yield Step("is refused by the decider", actor, branch), to(state, actor, None if stands else At.FORWARD)
        return
    if found is None and branch not in world.marked:
        state = changed(state, branch, void(world))
    yield Step("has the decider void", actor, branch), to(state, actor, At.UNDO if world.undone else At.CANCELED)


def forward(world: World, state: State, actor: Actor) -> Steps:
    """What the decider has committed goes on, whatever the log wanted."""
    del world
    if state.log is Log.CANCELING:
        yield Step("says applied after all", actor), to(state._replace(log=Log.APPLIED), actor, At.SETTLE)
    else:
        yield Step(f"cannot say applied: {state.log}", actor), to(state, actor, At.READ)


def undo(world: World, state: State, actor: Actor) -> Steps:
    """Rule 2: the receipt is turned, and what it says was applied is reverted, in one local transaction."""
    branch = world.undone[actor.place]
    found = state.receipts[branch]
    more = actor.place + 1 < len(world.undone)
    apart = world.broken is Broken.OWN_APART and world.own is Own.FIRST
    then = At.UNDO if more else At.REVERT if apart else At.CANCELED
    yield (
        Step("undoes", actor, branch),
        to(undone(world, state, branch, found), actor, then, (actor.place + 1) * more),
    )


def undone(world: World, state: State, branch: int, found: Receipt | None) -> State:
    """Return the state after an undo."""
    if branch in world.marked:
        if found is None:
            return state if world.broken is Broken.MARKED_KEPT else renewed(state, branch)
        return renewed(changed(state, branch, None, -1), branch)
    if found is None:
        return state if world.broken is Broken.UNDO_LEAVES_NOTHING else changed(state, branch, void(world))
    reverts = not found.expires or world.broken is Broken.UNDO_REVERTS_SETTLED
    if found.mark is Mark.APPLIED and reverts:
        left = None if world.broken is Broken.UNDO_DELETES else void(world)._replace(mark=Mark.UNDONE)
        return changed(state, branch, left, -1)
    return changed(state, branch, found._replace(expires=True))


def void(world: World) -> Receipt:
    """Return what refuses a late apply."""
    return Receipt(Mark.VOID, expires=world.broken is not Broken.VOID_STAYS)


def revert(world: World, state: State, actor: Actor) -> Steps:
    """The broken rule: the own branch is reverted where the log was canceling a moment ago."""
    del world
    yield Step("reverts the own branch", actor), to(state._replace(own=state.own - 1), actor, At.CANCELED)


def canceled(world: World, state: State, actor: Actor) -> Steps:
    """Rule 4: canceling becomes canceled, with the own branch reverted where that was the first."""
    if state.log is not Log.CANCELING:
        yield Step(f"cannot say canceled: {state.log}", actor), to(state, actor, At.READ)
        return
    reverts = world.own is Own.FIRST and world.broken is not Broken.OWN_APART
    state = state._replace(log=Log.CANCELED, own=state.own - reverts)
    yield Step("says canceled", actor), to(told(state, Log.CANCELED), actor, None)
