"""The transactional outbox: tasks and events are saved with their document, or not at all."""

from mongo_celery.outbox.collection import OutboxCollection
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.once import once
from mongo_celery.outbox.outbox import Outbox
from mongo_celery.outbox.stored_id import STORED_ID

__all__ = ["STORED_ID", "Event", "Outbox", "OutboxCollection", "once"]
