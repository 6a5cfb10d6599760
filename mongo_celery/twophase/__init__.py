"""Two-phase commit over documents. It is independent of bridges."""

from mongo_celery.twophase.participants import Participant
from mongo_celery.twophase.recoveries import Recovery
from mongo_celery.twophase.transaction import State, Transaction
from mongo_celery.twophase.twophase import TwoPhaseCommit

__all__ = ["Participant", "Recovery", "State", "Transaction", "TwoPhaseCommit"]
