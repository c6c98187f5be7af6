# Every target sets up what it needs: python3 (3.11 or later) with venv is enough. The work is done in tools/dev.
#
#   PYTHON=/path/to/python   use this one Python
#   ARGS='-k name -x'        further arguments for pytest (test, soak) or the injector (stress); the cases to run (bench),
#                            or the transcripts
#   TORCH=no                 do not try to install torch for the compatibility tests
#   SEEDS=1000               how many runs of the fault injector stress makes
#   ROUNDS=10                how often soak runs the suite

export PYTHON ARGS TORCH SEEDS ROUNDS

.PHONY: help demo test lint format transcripts stress soak bench clean

help: ## say what there is
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

demo: ## train on the handwritten digits with 4 ranks
	@tools/dev demo

test: ## lint, and the tests on every supported Python that this machine has
	@tools/dev test

lint: ## ruff and mypy
	@tools/dev lint

format: ## let ruff rewrite what it can
	@tools/dev format

transcripts: ## run every transcript of the documentation anew
	@tools/dev transcripts

stress: ## 1,000 groups that are shot at: signals, exhaustion, slow readers; what was broken, with its seed
	@tools/dev stress

soak: ## the suite ten times, every second time under load
	@tools/dev soak

bench: ## the benchmarks: Phalanx, its peer and the floor
	@tools/dev bench

clean: ## remove environments, caches and build products
	@tools/dev clean
