"""What belongs to one library that a project may use beside Celery and PyMongo; imported by who uses it."""
