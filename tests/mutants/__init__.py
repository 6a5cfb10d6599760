"""
For each promise, builds of the package in which one rule is broken, and the tests that must fail then.

A promise whose rule can be broken without a test that fails has no proof. `python -m tests.mutants` breaks one rule
after the other in a copy of the checkout, and runs the tests that are named for it.
"""
