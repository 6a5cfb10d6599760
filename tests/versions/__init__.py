"""The core of the tests against every version that is promised, each in an environment of its own."""
