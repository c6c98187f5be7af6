# Every target sets up what it needs: python3 (3.11 or later) with venv is enough. What they do stands in noxfile.py.
#
#   PYTHON=/path/to/python   use this one Python
#   ARGS='-k name -x'        further arguments for pytest (quick, test, matrix, soak), the injector (stress) or ruff's, mypy's and
#                            shellcheck's names (lint); the cases to run (bench), or the transcripts
#   TORCH=no                 do not try to install torch for the compatibility tests; TORCH=2.15.0: this one
#   SEEDS=1000               how many runs of the fault injector stress makes
#   ROUNDS=10                how often soak runs the suite

SEEDS ?= 1000
ROUNDS ?= 10

export PYTHON TORCH

SESSIONS = @$(or $(PYTHON),python3) tools/bootstrap.py

.PHONY: help demo quick test matrix lint format docs transcripts stress soak bench bench-smoke package constraints hooks clean

help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile

demo: ## train on the handwritten digits with 4 ranks
	$(SESSIONS) demo

quick: ## the tests to run while you work: those that take next to no time
	$(SESSIONS) quick -- $(ARGS)

test: ## all that must hold, on the Python at hand; lint; with ARGS, the tests alone
	$(SESSIONS) tests $(if $(ARGS),,lint) -- $(ARGS)

matrix: ## the rest: other Pythons, torch, Slurm and what else takes long, the lowest dependencies, the package, the site
	$(SESSIONS) long torch pythons $(if $(ARGS),,floors package docs) -- $(ARGS)

lint: ## ruff, mypy and shellcheck
	$(SESSIONS) lint -- $(ARGS)

format: ## let ruff rewrite what it can
	$(SESSIONS) format

package: ## build wheel and sdist, and use the wheel in an empty environment
	$(SESSIONS) package

docs: ## build the documentation's site, strictly
	$(SESSIONS) docs -- $(ARGS)

transcripts: ## run every transcript of the documentation anew
	$(SESSIONS) transcripts -- $(ARGS)

stress: ## 1,000 groups that are shot at, and 100 jobs of three hosts; what was broken, with its seed
	$(SESSIONS) stress -- --seeds 0-$$(($(SEEDS) - 1)) $(ARGS)

soak: ## the suite ten times, every second time under load
	$(SESSIONS) --rounds $(ROUNDS) tests long torch pythons -- $(ARGS)

bench: ## the benchmarks: Phalanx, its peers and the floor
	$(SESSIONS) bench -- $(ARGS)

bench-smoke: ## whether the benchmarks work, and find nothing lost, torn or left behind: a minute
	$(SESSIONS) bench -- --smoke $(ARGS)

constraints: ## pin the newest versions of all that tests, lint and the site use
	$(SESSIONS) constraints

hooks: ## let git run what lint runs, before each commit
	$(SESSIONS) hooks

clean: ## remove environments, caches and build products
	rm -rf .nox .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
