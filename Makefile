# make run    compact a sample from end to end: plan, compact, summary, and the original back
# make test   all tests                make lint    style and types
# make check  lint and test            make readme  refresh the generated parts of README.md
# make torture  500 kills, nothing lost   make fuzz    20,000 mutated transcripts
# make bench  speed and memory against parsing alone (BENCH="--sizes 10 --runs 1" for a quick look)
# make test-clients  the clients' own readers, and whole clients, on what haocompact writes (installs 2.6 GB)
# make bench-quality  what summaries keep, ours beside others' (QUALITY="facts --seeds 2" for a quick look)
# Everything happens in .venv (the quality bench: .venv-bench); PYTHON names another interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
RIVALS := local-context-compiler compaction-conformance-kit conpact
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CLIENTS ?= .clients
SAMPLE := samples/pi/weather-station.jsonl
HAOCOMPACT := $(BIN)/python -m haocompact

# A folder that was moved or copied carries an environment that points to the old place.
ifneq ($(shell cat $(VENV)/place 2>/dev/null),$(CURDIR))
MOVED := moved
endif

.DEFAULT_GOAL := run
.PHONY: run test test-clients lint check readme bench bench-quality torture fuzz clean moved

run: $(VENV)/installed
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	export HAOCOMPACT_ARCHIVE="$$folder/archive.db" HAOCOMPACT_LOG="$$folder/log" HAOCOMPACT_CONFIG="$$folder/config.toml"; \
	touch "$$HAOCOMPACT_CONFIG"; \
	echo '$$ haocompact plan --keep-recent 2000 $(SAMPLE)'; \
	$(HAOCOMPACT) plan --keep-recent 2000 $(SAMPLE); \
	echo; echo '$$ haocompact compact --keep-recent 2000 $(SAMPLE) -o compacted.jsonl'; \
	$(HAOCOMPACT) compact --keep-recent 2000 $(SAMPLE) -o "$$folder/compacted.jsonl"; \
	echo; echo 'The summary, the last line of compacted.jsonl:'; echo; \
	tail -n 1 "$$folder/compacted.jsonl" | $(BIN)/python -c 'import json; print(json.loads(input())["summary"])'; \
	echo; echo '$$ haocompact retrieve --restore compacted.jsonl -o original.jsonl'; \
	$(HAOCOMPACT) retrieve --restore "$$folder/compacted.jsonl" -o "$$folder/original.jsonl"; \
	$(BIN)/python -c 'import hashlib, pathlib, sys; \
	a, b = (hashlib.sha256(pathlib.Path(p).read_bytes()).hexdigest() for p in sys.argv[1:]); \
	print(f"{a}  {sys.argv[1]}\n{b}  original.jsonl"); sys.exit(a != b and "the two differ")' \
	$(SAMPLE) "$$folder/original.jsonl"; \
	echo 'The original is back, byte for byte.'

test: $(VENV)/tested
	@$(BIN)/python -m pytest -n auto

test-clients: $(VENV)/tested
	@$(BIN)/python tests/clients/install.py $(CLIENTS)
	@HAOCOMPACT_CLIENTS='$(abspath $(CLIENTS))' $(BIN)/python -m pytest tests/clients -rs --durations=0

lint: $(VENV)/tested
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy

check: lint test

# Kill -9 at 500 random points of an in-place batch: nothing is lost. KILLS and SEED may be given.
torture: $(VENV)/installed
	@$(BIN)/python tests/torture.py --kills $(or $(KILLS),500) --seed $(or $(SEED),0)

# 20,000 mutated transcripts through every command. FILES and SEED may be given.
fuzz: $(VENV)/installed
	@$(BIN)/python tests/fuzz.py --files $(or $(FILES),20000) --seed $(or $(SEED),0)

bench: $(VENV)/installed
	@$(BIN)/python tests/bench/speed.py $(BENCH)

bench-quality: $(BENCH_VENV)/installed
	@$(BENCH_VENV)/bin/python tests/bench/quality.py $(QUALITY)

readme: $(VENV)/installed
	@$(BIN)/python tests/readme.py

clean:
	@rm -rf $(VENV) $(BENCH_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find haocompact tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml $(MOVED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " \
	+ sys.version.split()[0] + ": make PYTHON=python3.12 names another")'
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --editable .
	@$(BIN)/python -m compileall -q haocompact  # as an installed package has it, whatever the environment says
	@printf %s '$(CURDIR)' > $(VENV)/place
	@touch $@

$(BENCH_VENV)/installed: pyproject.toml Makefile $(MOVED)
	@$(PYTHON) -m venv --clear $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --editable .
	@for rival in $(RIVALS); do $(BENCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install $$rival \
	|| echo "$$rival can't be installed here; its rows will be missing"; done
	@touch $@

$(VENV)/tested: $(VENV)/installed
	@$(PIP) install --editable . --group dev
	@touch $@
