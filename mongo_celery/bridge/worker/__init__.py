"""The bridge in a Celery worker: task classes, the execution of a run, its envelope and its heartbeat."""
