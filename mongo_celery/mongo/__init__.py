"""What MongoDB says and how it is asked: one home for each such question. Knows no feature and no Celery."""
