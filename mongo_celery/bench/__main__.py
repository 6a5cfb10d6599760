"""`python -m mongo_celery.bench`."""

from mongo_celery.bench.command import bench

if __name__ == "__main__":
    bench()
