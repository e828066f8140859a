# The words people type. `make` lists them. Settings: RECIPE NODES SITE NAME SET SHRINK RUN JOB BASELINE DEVICE ARGS
RECIPE ?= tiny
DEVICE ?= $(shell test -e /dev/davinci0 && echo npu || echo cpu)
VENV   := $(or $(ATLASRL_VENV),.venv)
READY  := $(VENV)/ready-$(DEVICE)
PYTEST := env/python -m pytest
FAST   := not verl and not cluster and not training and not browser and not nightly

.DEFAULT_GOAL := help
.PHONY: help setup train resume status logs stop tensorboard compare doctor test test-fast test-nightly bench lint clean \
        cluster-up cluster-down

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make or mend the Python environment (DEVICE=cpu|npu)
	@env/setup.sh $(DEVICE)

$(READY): $(wildcard env/requirements-$(DEVICE)*.txt env/constraints-$(DEVICE).txt) env/setup.sh
	@env/setup.sh $(DEVICE)

train: $(READY) ## train and watch (RECIPE=tiny NODES=2 SITE=file SET="steps=20 seed=3" NAME=run SHRINK=cpu)
	@bin/train $(RECIPE) --follow $(if $(NODES),--nodes $(NODES)) $(if $(SITE),--site $(SITE)) \
	    $(if $(NAME),--name $(NAME)) $(if $(SHRINK),--shrink $(SHRINK)) $(foreach change,$(SET),--set '$(change)') $(ARGS)

resume: $(READY) ## continue a run from its newest complete checkpoint (JOB=id or run name)
	@bin/resume $(or $(JOB),$(RUN)) --follow $(ARGS)

status: $(READY) ## all runs: state, attempt, step, reward, last checkpoint
	@bin/status $(ARGS)

logs: $(READY) ## print the logs of a run (RUN=name)
	@bin/logs $(or $(RUN),$(JOB)) $(ARGS)

stop: $(READY) ## end a run, checkpoint first (RUN=name)
	@bin/stop $(or $(RUN),$(JOB)) --save $(ARGS)

tensorboard: $(READY) ## serve the curves of all runs on this machine's loopback address
	@bin/tensorboard $(ARGS)

compare: $(READY) ## is RUN aligned with BASELINE?
	@bin/compare $(RUN) --baseline $(BASELINE) $(ARGS)

doctor: $(READY) ## is this machine fit for a job?
	@bin/doctor $(ARGS)

test: $(READY) ## all tests: fast ones first, then real clusters and training
	@$(PYTEST) -n 2 -m "$(FAST)" $(ARGS)
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --reruns 1 -m "not ($(FAST)) and not nightly" $(ARGS) # Ray gives a raylet 30 s, also on a busy machine

test-fast: $(READY) ## tests without clusters, torch workers or training
	@$(PYTEST) -n 2 -m "$(FAST)" $(ARGS)

test-nightly: $(READY) ## what is too long for `make test`: four workers, every kill of every layout (hours)
	@$(PYTEST) --reruns 1 -m nightly $(ARGS)

bench: $(READY) ## measure against named references, as ratios
	@for bench in tests/bench/bench_*.py; do echo "== $$bench"; env/python $$bench || exit 1; done

lint: $(READY) ## ruff, shell syntax
	@env/python -m ruff check . && env/python -m ruff format --check . && bash -n env/*.sh jobs/stages/*.sh bin/* .ci/run

cluster-up: $(READY) ## start a Slurm cluster of NODES nodes on this machine, for tests
	@env/python tests/cluster/up.py up $(or $(NODES),4)

cluster-down: $(READY) ## end the cluster of cluster-up
	@env/python tests/cluster/up.py down

clean: ## remove caches; runs and the environment stay
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} + ; rm -rf .pytest_cache .ruff_cache
