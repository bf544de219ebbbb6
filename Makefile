# Two commands matter: `make demo` and `make test`. Each sets up what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/*/pyproject.toml)
READY := $(VENV)/.ready
SOURCES := unlearnd $(wildcard plugins/*/unlearnd_*)

.PHONY: setup demo test test-postgres lint bench paper clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt $(PLUGINS)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "unlearnd needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[test,demo,s3,plot,paper]' $(patsubst %/pyproject.toml,-e ./%,$(PLUGINS))
	touch $(READY)

demo: $(READY)
	$(BIN)/unlearnd demo

# Tests start hundreds of processes: bytecode is kept, whatever the environment says, so that none compiles it all again.
test: $(READY) lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

# What has a ledger underneath and is about other things once more, with the ledger in PostgreSQL: of that, `make test` has
# only samples. What is about the ledger itself runs on both databases there.
test-postgres: $(READY)
	$(BIN)/python -m pytest -n 3 --dist worksteal --ledger postgresql $(addprefix tests/test_,$(addsuffix .py, \
		requests orders recipients thinning aware transfer))

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(SOURCES)

bench: $(READY)
	$(BIN)/python -m benchmarks

# The paper's evaluation into docs/results, resumable; `make paper QUICK=1` takes minutes, `make paper ONLY=sharding` a part.
paper: $(READY)
	$(BIN)/python -m benchmarks.paper $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(DATA),--data $(DATA)) \
		$(if $(FRESH),--fresh) $(if $(REPORT),--report)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
