"""The bridge inside a Celery worker: the Celery edge, one execution of a run, its envelope and its heartbeat."""
