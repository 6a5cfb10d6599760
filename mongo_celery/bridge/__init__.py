"""The bridge: changes in MongoDB become ordered, fenced Celery tasks."""
