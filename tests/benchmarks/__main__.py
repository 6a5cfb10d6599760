"""`python -m tests.benchmarks`."""

from tests.benchmarks.command import benchmarks

if __name__ == "__main__":
    benchmarks()
