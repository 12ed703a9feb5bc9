# A short way in; CMake does the work. `make` builds build/dcp-attn, `make help` says the rest.
BUILD ?= build
PREFIX ?= /usr/local
DESTDIR ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
GENERATOR := $(if $(shell command -v ninja 2>/dev/null),-G Ninja,)

.PHONY: all setup demo check bench install format clean help
all: $(BUILD)/CMakeCache.txt
	@cmake --build $(BUILD) -j $(JOBS) --target product

$(BUILD)/CMakeCache.txt:
	@scripts/setup.sh --quiet
	@cmake -S . -B $(BUILD) $(GENERATOR) -DCMAKE_INSTALL_PREFIX=$(PREFIX) $(CMAKE_ARGS) > $(BUILD).log 2>&1 \
	  || { cat $(BUILD).log; rm -f $(BUILD)/CMakeCache.txt; exit 1; }
	@rm -f $(BUILD).log

setup:  ## install the Debian packages that are missing
	@scripts/setup.sh

demo: all  ## fetch a small model and let it answer on 1 rank and on 4
	@scripts/demo.sh $(BUILD)

check: all  ## every test: unit, fault, golden cases, the command
	@cmake --build $(BUILD) -j $(JOBS)
	@scripts/check.sh $(BUILD)

bench: all  ## figures of this machine, as far as there are benches
	@scripts/bench.sh $(BUILD)

install: all  ## into PREFIX (default /usr/local), below DESTDIR if given
	@DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(PREFIX)

format:  ## clang-format every source
	@scripts/format.sh

clean:  ## remove the build
	@rm -rf $(BUILD)

help:
	@echo "make            build $(BUILD)/dcp-attn"
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/make \1\t\2/p' Makefile | expand -t 16
