"""`python -m tests.versions`."""

from tests.versions.command import versions

if __name__ == "__main__":
    versions()
