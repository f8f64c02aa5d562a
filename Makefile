# Everything that is done with this repository has a verb here; CI calls the same ones. CONTRIBUTING.md says more.
# Verbs set up what they need (Debian packages, .venv) and do nothing twice.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
JOBS ?= $(shell nproc)
PY := .venv/bin/python
CMAKE := cmake -S . -G Ninja
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help demo test lint fmt asan tsan crash bench compat docs clean setup install cpp_tests

help:
	@echo 'make demo     train under fire and compare with an undisturbed run'
	@echo 'make test     all tests of C++ and Python, with a sample of the crash campaigns'
	@echo 'make lint     formats, static checks, types, import rules, links (make fmt mends what it can)'
	@echo 'make asan     C++ tests under the address and undefined-behaviour sanitizers'
	@echo 'make tsan     C++ tests under the thread sanitizer'
	@echo 'make crash    every point of the crash matrix and of the strace campaign, every mutant, and what is large'
	@echo 'make bench    floors, peers and Unbroken side by side'
	@echo 'make compat   the tests of checkpoints, DCP and resuming on the newer versions of torch'
	@echo 'make docs     checks links, and writes the stub of the extension anew'
	@echo 'make clean    removes build/'

setup:
	@tools/setup demo test

install: setup
	@tools/install

demo: install
	$(PY) examples/digits/demo.py $(DEMO_ARGS)

cpp_tests: setup
	@$(CMAKE) -B build/test -DUNBROKEN_TESTS=ON -DUNBROKEN_CLI=OFF >build/test.log || { cat build/test.log; exit 1; }
	@cmake --build build/test --parallel $(JOBS)

test: install cpp_tests
	ctest --test-dir build/test --output-on-failure --parallel $(JOBS)
	$(PY) -m pytest tests/python

lint:
	@tools/setup lint
	@tools/lint

fmt:
	@tools/setup lint
	@tools/lint --fix

# Processes that are killed on purpose leave their memory behind, and a fork of a threaded process is not what the thread
# sanitizer is for: of the crash tests it runs those whose lives are threads.
asan: setup
	@$(CMAKE) -B build/asan -DUNBROKEN_TESTS=ON -DUNBROKEN_CLI=OFF -DUNBROKEN_SANITIZE=address,undefined >/dev/null
	@cmake --build build/asan --parallel $(JOBS)
	UBSAN_OPTIONS=print_stacktrace=1 ctest --test-dir build/asan --output-on-failure --parallel $(JOBS)

tsan: setup
	@$(CMAKE) -B build/tsan -DUNBROKEN_TESTS=ON -DUNBROKEN_CLI=OFF -DUNBROKEN_SANITIZE=thread >/dev/null
	@cmake --build build/tsan --parallel $(JOBS)
	TSAN_OPTIONS=halt_on_error=1 ctest --test-dir build/tsan --output-on-failure --label-exclude crash --parallel $(JOBS)
	TSAN_OPTIONS=halt_on_error=1 build/tsan/tests/unbroken_crash_test --gtest_brief=1 \
	    --gtest_filter='Steps*:Invariant[1-5]*:Fence*:TwoStarts.OneWins*'

crash: install cpp_tests
	UNBROKEN_CRASH=full ctest --test-dir build/test --label-regex crash --output-on-failure
	$(PY) tests/crash/strace_campaign.py --all
	UNBROKEN_TEST_SAVE_MB=256 UNBROKEN_HUGE=1 $(PY) -m pytest tests/python/checkpoint/test_bounded.py \
	    tests/python/dcp/test_kinds.py -k '200_saves or really_large'

bench: install
	@tools/setup bench
	$(PY) bench/run.py $(BENCH_ARGS)

compat: setup
	@tools/compat

docs: install
	@$(PY) tools/docs
	@tools/stub --fix

clean:
	rm -rf build
