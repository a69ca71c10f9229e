# make train, make test: each makes .venv if it is missing, installs what it needs, and runs.

PYTHON ?= python3
BIN := .venv/bin
# CONSTRAINTS=/dev/null takes the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

.PHONY: help train test test-deep parity parity-deep soak bench bench-decoding lint docs wheel hashes clean

help:
	@echo "make train [ARGS='EXPERIMENT --FIELD VALUE ...']   train a model; make train ARGS=--help lists experiments"
	@echo "make test  [ARGS='-k NAME ...']                    prove that JAX and PyTorch agree; test the rest"
	@echo "make test-deep [ARGS='-k NAME ...']                what is only depth: full sizes, kills, many processes, every fault, a whole recipe"
	@echo "make parity [ARGS='-k gpt2 ...']                   run the parity gates alone; report: parity-report/parity.html"
	@echo "make parity-deep [SEED=N]                          3,000 random architectures, every Hugging Face model in every type; 45 minutes or more"
	@echo "make soak [SEED=N]                                 kill runs 200 times in one process and 50 times in two: not one bit is lost; half an hour"
	@echo "make bench [ARGS='--device gpu ...']               speed and memory side by side with PyTorch; takes at most a quarter of an hour"
	@echo "make bench-decoding [ARGS='--device gpu ...']      decoding side by side with Hugging Face; takes 6 minutes"
	@echo "make lint                                          ruff and mypy"
	@echo "make docs                                          the documentation as a site: site/index.html"
	@echo "make wheel                                         dist/*.whl, built with nothing but what constraints-hashes.txt names"
	@echo "make hashes                                        write constraints-hashes.txt anew, after a change to constraints.txt"
	@echo "make clean                                         remove .venv and .venv-hashed"

train: .venv/core
	@$(BIN)/python train.py $(ARGS)

test: .venv/test
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not deep' $(ARGS)

test-deep: .venv/test
	@$(BIN)/python -m pytest -n 3 --dist worksteal -m deep $(ARGS)

parity: .venv/test
	@$(BIN)/python -m pytest -n 2 --dist worksteal -o testpaths=parity_tests --parity-report parity-report $(ARGS)
	@$(if $(ARGS),,$(BIN)/python -m parity_tests.tables --check)

parity-deep: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal parity_tests/test_random_architectures.py parity_tests/test_huggingface.py parity_tests/test_decoding_huggingface.py --deep $(or $(SEED),$(shell date +%s)) $(ARGS)

soak: .venv/test
	$(BIN)/python -m pytest -s tests/test_soak.py --soak $(or $(SEED),$(shell date +%s)) $(ARGS)

bench: .venv/test
	@for name in train_step startup; do echo "== benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

bench-decoding: .venv/test
	@$(BIN)/python -m benchmarks.decoding $(ARGS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: .venv-hashed/made
	@.venv-hashed/bin/python -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir dist .

docs: .venv/docs
	@JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs site

# Of every version all that is published, so that the file serves every platform. PyTorch's builds come from several places.
hashes: .venv/made
	@$(PIP) pip-tools
	@{ echo "# constraints.txt with hashes, but for torch and what needs it: make hashes writes it, make wheel installs it."; \
	  grep -v -E '^(accelerate|peft|torch)==' constraints.txt | $(BIN)/python -m piptools compile --quiet --generate-hashes --allow-unsafe \
	  --strip-extras --no-annotate --no-header --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  --no-emit-options --output-file - - | grep -v -e '^$$' -e '^#'; } > constraints-hashes.partial
	@mv constraints-hashes.partial constraints-hashes.txt

clean:
	rm -rf .venv .venv-hashed

.venv/made:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); sys.exit(0 if ok else "Python %d.%d found; expected 3.11 to 3.13: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/core: .venv/made pyproject.toml constraints.txt
	@echo "installing what training needs into .venv ..."
	@$(PIP) --editable .
	@touch $@ && touch -r $@ .venv/made

.venv/test: .venv/made pyproject.toml constraints.txt
	@echo "installing what the tests need into .venv ..."
	@$(PIP) --editable '.[parity,dev]'
	@touch $@ .venv/core && touch -r $@ .venv/made

.venv/docs: .venv/test
	@echo "installing what the documentation needs into .venv ..."
	@$(PIP) --editable '.[parity,dev,docs]'
	@touch $@

.venv-hashed/made: constraints-hashes.txt
	@echo "installing what has a hash into .venv-hashed ..."
	@$(PYTHON) -m venv --clear .venv-hashed
	@.venv-hashed/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement constraints-hashes.txt
	@touch $@
