"""What `manage.py` finds: the commands of `celery -A`, for who has the one at hand and not the other."""
