"""`python -m tests.chaos`."""

from tests.chaos.command import chaos

if __name__ == "__main__":
    chaos()
