# A short way in; CMake does the work. `make` builds build/dcp-attn, `make help` says the rest.
BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
GENERATOR := $(if $(shell command -v ninja 2>/dev/null),-G Ninja,)

.PHONY: all setup demo oom-demo check check-long abi bench bench-merge bench-attend bench-llama install format clean help
all: $(BUILD)/CMakeCache.txt
	@cmake --build $(BUILD) -j $(JOBS) --target product

$(BUILD)/CMakeCache.txt:
	@scripts/setup.sh --quiet
	@cmake -S . -B $(BUILD) $(GENERATOR) -DCMAKE_INSTALL_PREFIX="$(PREFIX)" $(CMAKE_ARGS) > $(BUILD).log 2>&1 \
	  || { cat $(BUILD).log; rm -f $(BUILD)/CMakeCache.txt; exit 1; }
	@rm -f $(BUILD).log

setup:  ## install the Debian packages that are missing
	@scripts/setup.sh

demo: all  ## fetch a small model and let it answer on 1 rank and on 4
	@scripts/demo.sh $(BUILD)

oom-demo: all  ## the published out-of-memory case under one cap per rank: published forms fail, the operator finishes
	@scripts/oom-demo.sh $(BUILD)

check: all  ## every test: unit, fault, golden cases, the command
	@cmake --build $(BUILD) -j $(JOBS)
	@scripts/check.sh $(BUILD)

check-long: all  ## make check, and combinations of options that repeat what it covers
	@cmake --build $(BUILD) -j $(JOBS)
	@scripts/check.sh $(BUILD) --long

abi: all  ## store sizes, offsets and exported names of the public interface after a change that is meant
	@tools/abi.py $(BUILD)/libdcpattn.so --update

bench: all  ## figures of this machine, as far as there are benches
	@scripts/bench.sh $(BUILD)

bench-merge: all  ## the merge beside the published form: docs/BENCHMARKS.md's table, docs/bench-merge.svg
	@scripts/bench-merge.sh $(BUILD)

bench-attend: all  ## attention and products beside the machine's roofs: docs/BENCHMARKS.md's table, docs/bench-attend.svg
	@scripts/bench-attend.sh $(BUILD)

bench-llama: all  ## tokens per second side by side with llama.cpp (built from PyPI's source first)
	@scripts/bench-llama.sh $(BUILD)

install: all  ## into PREFIX (default /usr/local), below DESTDIR if given
	@DESTDIR="$(DESTDIR)" cmake --install $(BUILD) --prefix "$(PREFIX)"

format:  ## clang-format every source
	@scripts/format.sh

clean:  ## remove the build
	@rm -rf $(BUILD)

help:
	@echo "make            build $(BUILD)/dcp-attn"
	@sed -n 's/^\([a-z-]*\):.*##\(.*\)/make \1\t\2/p' Makefile | expand -t 16
