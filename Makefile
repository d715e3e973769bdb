# Two commands do all the set-up: `make quickstart` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test test-slow test-kernels lint bench docs clean

install: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

quickstart: install
	$(BIN)/replaylab data info sample
	$(BIN)/replaylab train bc --data sample --steps 3000 --seeds 0 1 2 --final-episodes 50 --out runs/quickstart/all --overwrite
	$(BIN)/replaylab train bc --data sample --steps 3000 --seeds 0 1 2 --final-episodes 50 --top-fraction 0.3 --out runs/quickstart/best --overwrite
	$(BIN)/replaylab report runs/quickstart --out runs/quickstart/report.html
	@echo "Done. Open runs/quickstart/report.html in a browser."

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2
	rm -rf sweeps/smoke
	$(BIN)/replaylab sweep benchmarks/smoke.yaml

test-slow: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ray[default]==2.60.0'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m slow --timeout 3600

test-kernels: install # on a CPU, in Triton's interpreter; on a GPU the same tests run as they are
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'triton==3.7.1'
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 tests/test_adafactor.py tests/test_adam.py tests/test_attention.py tests/test_bits.py tests/test_world_kernel.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/replaylab bench

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv site runs
