"""Calls of MongoDB and the meaning of its answers: one home for each question. Knows no feature and no Celery."""
