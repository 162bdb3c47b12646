# Needs Python >= 3.10 and make; the demo and the tests also need a C++ compiler on the CPU.
#   make demo              set up .venv and run the demo
#   make test              set up .venv and run the CPU tests
#   make test TORCH=2.14.1 the same with another PyTorch, in an environment of its own
#   make test-gpu          run the GPU tests with the python3 on the path (see CONTRIBUTING.md)
#   make sanitize-gpu      a reduced matrix of both kernels under compute-sanitizer's memcheck

PYTHON ?= python3
TORCH ?= 2.13.0
WORKERS ?= 2

ifeq ($(TORCH),2.13.0)
VENV := .venv
else
VENV := .venv-torch$(TORCH)
endif
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test test-gpu sanitize-gpu venv clean

venv: $(READY)

# Other PyTorch releases pin their own Triton, so only that line and torch's are left open.
$(READY): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	sed -e 's/^torch==.*/torch==$(TORCH)/' $(if $(filter 2.13.0,$(TORCH)),,-e '/^triton==/d') \
	    constraints.txt > $(VENV)/constraints.txt
	$(RUN) -m pip install -q --disable-pip-version-check 'torch==$(TORCH)'
	$(RUN) -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[test]'
	touch $@

demo: $(READY)
	$(RUN) -m fa_inductor.demo

test: $(READY)
	$(RUN) -m pytest tests -m 'not gpu' -n $(WORKERS) --dist worksteal

test-gpu:
	$(PYTHON) -m pytest tests/gpu -m gpu

# API errors are left out: cuda-python asks for functions that a driver may not have.
sanitize-gpu:
	compute-sanitizer --tool memcheck --report-api-errors no $(PYTHON) tests/gpu/sanitizer_cases.py

clean:
	rm -rf .venv .venv-torch* build dist *.egg-info
