# make, or make help, lists what there is.
SHELL := /bin/bash
export PATH := $(PATH):/usr/local/go/bin

PREFIX ?= /usr/local
FUZZTIME ?= 30s
# empty without git: farblk version then says what Go put into the program
VERSION ?= $(patsubst v%,%,$(shell git describe --tags --always --dirty 2>/dev/null))
GOFLAGS_BUILD := -trimpath -ldflags '-s -w -X main.release=$(VERSION)'
# without cgo only the rdmacm provider is missing
NO_CGO := CGO_ENABLED=0
SHELL_SCRIPTS = $(shell grep -rlE '^\#!.*\bbash|^\# shellcheck shell=bash' scripts .ci 2>/dev/null)

.PHONY: help build check test test-vm test-bins bench demo lint unit no-cgo fuzz-smoke install clean FORCE

help: ## lists these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

build: bin/farblk ## builds bin/farblk

bin/farblk: FORCE
	@mkdir -p bin
	go build $(GOFLAGS_BUILD) -o bin/farblk ./cmd/farblk

check: lint unit no-cgo ## formatting, vet, staticcheck, unit tests with -race, and the build without cgo

lint: ## gofumpt, vet, staticcheck, and shellcheck where it is installed
	@bad=$$(go tool gofumpt -l .) && [ -z "$$bad" ] || { echo "not formatted, run go tool gofumpt -w: $$bad"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	@if command -v shellcheck >/dev/null; then shellcheck -x -P . $(SHELL_SCRIPTS); else echo "shellcheck is not installed: scripts not looked at"; fi

unit:
	go test -race ./...

no-cgo:
	$(NO_CGO) go build ./...

test: ## everything, after installing what it needs: check, the tests without cgo, and those in the virtual machine
	@scripts/phase "set-up" scripts/setup test
	@scripts/phase "lint" $(MAKE) --no-print-directory lint
	@scripts/phase "tests, none skipped" scripts/strict-test -race ./...
	@scripts/phase "build and tests without cgo" $(MAKE) --no-print-directory test-no-cgo
	@scripts/phase "tests in the virtual machine" $(MAKE) --no-print-directory test-vm

.PHONY: test-no-cgo
test-no-cgo: no-cgo
	$(NO_CGO) go test ./...

test-vm: build test-bins ## only the tests in the virtual machine; T="10 fuse" names some
	scripts/vm/run $(T)

# the tests that run in the guest, where the RDMA devices and the kernel's NBD are
test-bins:
	@mkdir -p bin
	@if [ -n "$$(go list -f '{{.TestGoFiles}}{{.XTestGoFiles}}' ./transport/verbs/rdmacm 2>/dev/null | tr -d '[]')" ]; then \
		go test -c -o bin/rdmacm.test ./transport/verbs/rdmacm; fi
	@go test -c -o bin/nbd.test ./blockdev/nbd

bench: build ## the benchmarks, beside the programs they are compared with
	@scripts/setup test
	@for f in scripts/bench/*; do [ -x $$f ] && [ -f $$f ] || continue; scripts/phase "$$f" $$f || exit; done

demo: ## target, connect, export and verify on this machine: no RDMA device and no privilege needed
	@scripts/setup -k demo
	@$(MAKE) --no-print-directory build
	@scripts/demo

fuzz-smoke: ## every fuzz target for FUZZTIME (30s)
	scripts/fuzz-smoke $(FUZZTIME)

install: build ## installs to PREFIX (/usr/local)
	install -D -m 755 bin/farblk $(DESTDIR)$(PREFIX)/bin/farblk

clean: ## removes what was built
	rm -rf bin
