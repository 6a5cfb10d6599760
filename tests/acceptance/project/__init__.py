"""The Celery project whose listeners and workers `test_listener.py` starts, kills and freezes."""
