"""Support for single libraries that a project may use beside Celery and PyMongo; imported by who uses it."""
