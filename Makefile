# What there is to run. Each target is one command that you can type as well.
.PHONY: test check docs demo chaos nightly

test:     ## the tests, in seven minutes
	python -m pytest

check:    ## all checks of a change, on a clean machine too
	.ci/run

docs:     ## the site, in build/site
	sphinx-build -n -W -q -c docs . build/site

demo:     ## kills, and a verdict
	mongo-celery demo

chaos:    ## everything at once, judged
	python -m tests.chaos --seed 1 --seconds 60

nightly:  ## everything that takes long
	.ci/nightly
