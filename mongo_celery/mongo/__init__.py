"""MongoDB calls and the meaning of their answers. Each question has one module. Independent of features and Celery."""
