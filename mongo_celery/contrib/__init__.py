"""Support for libraries beside Celery and PyMongo. Import the modules that you need."""
