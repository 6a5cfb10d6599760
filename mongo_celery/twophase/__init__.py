"""Two-phase commit over documents; knows nothing of bridges."""

from mongo_celery.twophase.coordinator import TwoPhaseCommit
from mongo_celery.twophase.participants import Participant
from mongo_celery.twophase.recovery import Recovery
from mongo_celery.twophase.states import State, Transaction

__all__ = ["Participant", "Recovery", "State", "Transaction", "TwoPhaseCommit"]
