# Whimbrel's commands. All of them first make this machine ready (scripts/setup: quick when nothing is missing), and need root.
#
#   make test    format, lints, licences, and all tests but the long ones: half an hour on two cores
#   make demo    two hosts, a Debian guest that serves, a client that watches, and a migration with its report; then a
#                network far away, an SSH session, a download, and a migration there and back
#   make rack    tests on whole emulated machines, into docs/tried-on.md: three quarters of an hour; TEST=nfs runs those
#                with nfs in their names
#   make soak    the long tests too: all fault points, many seeds: hours
#   make lint    format, lints and licences alone
#   make size    builds the program as users get it, and checks its size
#   make bench   measures migrations by Whimbrel and by QEMU itself, side by side, into docs/evaluation/: hours, on an idle
#                machine; SUITE=idle (or another suite, or a case) measures a part, and leaves the rest as it is; TURNS=50
#                measures so often
#   make bench-disks       measures guests that move with their disks, beside it: hours as well; CASE=static measures
#                          one case
#   make bench-wan         measures moves to another network, far away: half an hour; CASE and TURNS as above
#   make bench-sweep       measures what a migration's cost depends on, beside it: hours; points that were measured
#                          before stay as they are; FIGURE=1 or FIGURE=5 measures one of its figures
#   make bench-functions   how long the functions take that matter (docs/performance.md)
#   make callgrind         how many instructions their inner loops take, compared with docs/callgrind.txt;
#   make callgrind-update  puts what it finds there
#   make guest-agent       builds whimbrel-guest for guests of any kind, without any dependencies
#   make guests  makes the guests and the newer QEMU anew
#
# At the end `test` and `soak` list what could not be tried on this machine. With WHIMBREL_REQUIRE_QEMU_10=1 they fail
# where there is no newer QEMU.
#
# Where things are kept: target/ (builds), .cache/ (QEMU, kernel, guests).

SHELL := /bin/sh
.DEFAULT_GOAL := test
CARGO := cargo
PATH := $(PATH):$(HOME)/.cargo/bin
export PATH

.PHONY: test demo rack soak lint size bench bench-disks bench-wan bench-sweep bench-functions callgrind callgrind-update guest-agent guests

test: lint
	scripts/setup newer-qemu tiny-guest debian-guest database-guest rack
	. scripts/test-env && { $(CARGO) test --locked --workspace --no-fail-fast; passed=$$?; scripts/not-tried; exit $$passed; }

lint:
	scripts/setup packages deny
	$(CARGO) fetch --locked
	$(CARGO) fmt --all --check
	$(CARGO) deny --offline --log-level error check licenses bans sources
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

size:
	scripts/setup packages
	$(CARGO) build --locked --release -p whimbrel
	scripts/size target/release/whimbrel

soak: size
	scripts/setup packages newer-qemu tiny-guest debian-guest database-guest rack
	. scripts/test-env && { WHIMBREL_SOAK=1 $(CARGO) test --locked --workspace -- --include-ignored --nocapture; passed=$$?; scripts/not-tried; exit $$passed; }

# What was tried is the last commit that changed the product: results themselves are committed later.
TEST ?=
rack:
	scripts/setup packages newer-qemu tiny-guest rack
	. scripts/test-env && { \
	    export WHIMBREL_RACK_RESULTS="$$PWD/.cache/rack-results"; : >"$$WHIMBREL_RACK_RESULTS"; \
	    $(CARGO) test --locked --workspace --test rack -- --include-ignored $(TEST); passed=$$?; \
	    $(CARGO) run --quiet --locked -p whimbrel-lab -- tried-on --add "$$WHIMBREL_RACK_RESULTS" \
	        --commit "$$(git log -1 --format=%h -- crates bin/whimbrel/src)" \
	        --results docs/tried-on.json --page docs/tried-on.md; \
	    scripts/not-tried; exit $$passed; }

demo:
	scripts/setup packages newer-qemu debian-guest
	$(CARGO) build --locked --release -p whimbrel -p whimbrel-lab
	target/release/whimbrel-lab demo

# With the policies that only benchmarks ask for.
FOR_BENCHES := --locked --release -p whimbrel -p whimbrel-lab --features whimbrel/comparison

SUITE ?= all
TURNS ?=
bench:
	scripts/setup packages newer-qemu tiny-guest debian-guest
	$(CARGO) build $(FOR_BENCHES)
	. scripts/test-env && target/release/whimbrel-lab bench --suite $(SUITE) $(TURNS:%=--turns %) --results docs/evaluation/results.json --page docs/evaluation/migrations.md --plots docs/evaluation

CASE ?=
bench-disks:
	scripts/setup packages newer-qemu bench-disks services-guest
	$(CARGO) build $(FOR_BENCHES)
	. scripts/test-env && target/release/whimbrel-lab disks $(CASE:%=--case %) --results docs/evaluation/disks.json --page docs/evaluation/disks.md --plots docs/evaluation

bench-wan:
	scripts/setup packages newer-qemu tiny-guest
	$(CARGO) build $(FOR_BENCHES)
	. scripts/test-env && target/release/whimbrel-lab wan $(CASE:%=--case %) $(TURNS:%=--turns %) --results docs/evaluation/wan.json --page docs/evaluation/wan.md --plots docs/evaluation

FIGURE ?=
bench-sweep:
	scripts/setup packages newer-qemu tiny-guest
	$(CARGO) build $(FOR_BENCHES)
	. scripts/test-env && target/release/whimbrel-lab sweep $(FIGURE:%=--figure %) --results docs/evaluation/sweep.json --page docs/evaluation/sweep.md --plots docs/evaluation

# --target keeps the flags away from build scripts.
guest-agent:
	scripts/setup packages
	RUSTFLAGS="-C target-feature=+crt-static" $(CARGO) build --locked --release --target $(shell uname -m)-unknown-linux-gnu -p whimbrel-guest
	@ls -l target/$(shell uname -m)-unknown-linux-gnu/release/whimbrel-guest

bench-functions:
	scripts/setup packages
	$(CARGO) bench --locked -p whimbrel-proto -p whimbrel-engine -p whimbrel-link -p whimbrel-memory -p whimbrel-tracee --bench functions

callgrind:
	scripts/setup packages bench
	scripts/callgrind

callgrind-update:
	scripts/setup packages bench
	scripts/callgrind --update

guests:
	REBUILD=1 scripts/setup packages newer-qemu tiny-guest debian-guest database-guest services-guest
