# The commands a person needs; each also says what it does in CONTRIBUTING.md.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build static demo test test-long check bench bench-vhost bench-peers bench-life bench-xen report count fuzz sim soak guest peer iotests tidy deny test-xen clean

# rustup puts cargo here, and a shell that was open before does not know it yet.
export PATH := $(HOME)/.cargo/bin:$(PATH)

# Seeds for the simulator, seconds for each fuzz target.
SEEDS ?= 100000
SECONDS_EACH ?= 60
# How long `make soak` goes on.
HOURS ?= 1
# A source tree of QEMU, for its own block tests.
QEMU_TREE ?=
# More arguments for `spile demo`, the benchmarks, the counts and the peer tests.
ARGS ?=

help:
	@echo 'make demo               install what is missing, build, and show Spile at work'
	@echo 'make static             build one static file, and run the demo as on Linux 4.19'
	@echo 'make test               every check; ends with "N passed, N failed, N skipped"'
	@echo 'make check              what a change to a few crates needs, in minutes  (ARGS="--base main")'
	@echo 'make test-long          the long versions of some checks, for hours'
	@echo 'make bench              Spile beside qemu-nbd and nbdkit  (ARGS="--only randread")'
	@echo 'make bench-vhost        the same over vhost-user, beside qemu-storage-daemon and fio'
	@echo 'make bench-peers        a few lines of both, and the picture of them in README.md'
	@echo 'make bench-life         copies and merges of disks, beside qemu-img and nbdcopy  (ARGS="--rounds 9")'
	@echo 'make bench-xen          instructions of a request on a nested Xen, beside blkback and qdisk  (ARGS=--quick)'
	@echo 'make report             run the experiments, and make a page of them for this machine  (ARGS=--quick)'
	@echo 'make count              instructions of one request against those kept  (ARGS=--update)'
	@echo 'make sim SEEDS=100000   the crash simulator over that many seeds'
	@echo 'make soak HOURS=1       servers and guests under kills, full disks, hung stores, with verified loads'
	@echo 'make fuzz               each fuzz target for SECONDS_EACH=60'
	@echo 'make peer               only the tests against other programs  (ARGS=test_fio)'
	@echo 'make iotests QEMU_TREE=DIR  the tests that QEMU has for qcow2, over Spile; DIR is its source tree  (ARGS=017)'
	@echo 'make guest              only the tests with a guest under QEMU'
	@echo 'make test-xen           only the tests on a nested Xen  (ARGS=test_process)'

setup:
	@scripts/setup.sh build

build: setup
	@cargo build --release --package spile

static:
	@scripts/setup.sh static
	@scripts/static.sh

demo: build
	@"$${CARGO_TARGET_DIR:-target}/release/spile" demo $(ARGS)

test:
	@scripts/setup.sh test
	@cargo xtask test

check:
	@scripts/setup.sh build
	@cargo xtask check $(ARGS)

test-long:
	@scripts/setup.sh test
	@cargo xtask test-long

bench:
	@scripts/setup.sh test
	@cargo xtask bench $(ARGS)

bench-vhost:
	@scripts/setup.sh test
	@cargo xtask bench-vhost $(ARGS)

bench-peers:
	@scripts/setup.sh test
	@cargo xtask bench-peers $(ARGS)

bench-life:
	@scripts/setup.sh test
	@cargo xtask bench-life $(ARGS)

bench-xen:
	@scripts/setup.sh test
	@cargo xtask bench-xen $(ARGS)

# Each experiment writes its result; one that cannot run here leaves the others theirs.
report: build
	@spile="$${CARGO_TARGET_DIR:-target}/release/spile"; \
	"$$spile" bench all --out target/report $(ARGS) || echo "not all experiments have gone well" >&2; \
	"$$spile" report target/report -o target/report/index.html

count:
	@scripts/setup.sh test
	@cargo xtask count $(ARGS)

fuzz:
	@scripts/setup.sh build
	@cargo xtask fuzz --seconds $(SECONDS_EACH) $(ARGS)

sim:
	@scripts/setup.sh build
	@cargo xtask sim --seeds $(SEEDS) $(ARGS)

soak:
	@scripts/setup.sh test
	@cargo xtask soak --hours $(HOURS) $(ARGS)

peer:
	@scripts/setup.sh test
	@cargo xtask peer $(ARGS)

iotests:
	@scripts/setup.sh test
	@QEMU_TREE="$(QEMU_TREE)" cargo xtask iotests $(ARGS)

guest:
	@scripts/setup.sh test
	@cargo xtask guest $(ARGS)

test-xen:
	@scripts/setup.sh test
	@cargo xtask xen $(ARGS)

tidy:
	@cargo xtask tidy

deny:
	@cargo xtask deny

clean:
	@cargo clean
