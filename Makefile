# The one front door. `make` alone says what there is.

PREFIX  ?= /usr/local
DESTDIR ?=
CARGO   ?= cargo
export CARGO

.DEFAULT_GOAL := help
.PHONY: help build run recording plots check test test-long test-booted fresh test-kernel bench lint soak fuzz docs reference install deb rpm static reproducible release clean

help: ## what there is
	@echo 'vshunt: virtual disks served by many queues and many workers'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1\t\2/p' Makefile | while IFS='	' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

build: ## the programs, optimised, in target/release
	$(CARGO) build --release --workspace --locked

run: build ## a minute's tour: a disk served, driven, its queues moved under load; no root, no QEMU
	scripts/run

recording: build ## the terminal recording of the README and a screen of top, in docs/pictures; a minute, best on a quiet machine
	scripts/recording

plots: build ## IOPS by jobs and by depth, drawn in docs/pictures; about seven minutes, only on a quiet machine
	$${CARGO_TARGET_DIR:-target}/release/vshunt-bench workers --runtime 1s --reps 3 --plot docs/pictures/workers.svg
	$${CARGO_TARGET_DIR:-target}/release/vshunt-bench depth --runtime 1s --reps 3 --formats null --plot docs/pictures/depth.svg

check: ## the fast loop: format, clippy, unit tests of the crates that differ from main
	scripts/check

test: ## every test, or ONLY=lint|cargo|rigs|fuse|…; as root on Debian installs what is missing (VSHUNT_NO_INSTALL=1: does not)
	scripts/test $(if $(ONLY),--only $(ONLY))

test-long: ## the tests that take long: random seeds, whole matrices; ONLY= chooses a folder of tests/
	scripts/test --long $(if $(ONLY),--only $(ONLY))

test-booted: ## the unit and black-box tests in a booted Debian with systemd, as root; ONLY=cargo|rigs|fuse|…; CI does not run it
	scripts/booted $(if $(ONLY),--only $(ONLY))

fresh: ## every test, or ONLY=…, on HEAD as on a machine after its first boot, as root; scripts/fresh has more choices
	scripts/fresh $(if $(ONLY),ONLY=$(ONLY))

test-kernel: ## the kernel module and what uses it: on a stock kernel in VMs, some minutes
	scripts/test --only kernel

bench: build ## the comparison tables; BENCH_ARGS='--only depth --quick': the curve over depth alone, in 3 minutes
	scripts/bench

lint: ## rustfmt, clippy, cargo doc, cargo-deny, circles between modules, ruff, shellcheck
	scripts/test --only lint

soak: ## the long forms of the tests: SOAK_MINUTES (60) of each
	scripts/soak

fuzz: ## every fuzz target for FUZZ_SECONDS (600)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-600} scripts/fuzz

docs: ## the book, in docs/book
	scripts/docs

reference: ## docs/reference, made from the tables in code
	VSHUNT_REFERENCE=write $(CARGO) test -p vshunt --lib --locked reference

install: build ## programs, man pages, completions, units; PREFIX=/usr/local DESTDIR=
	PREFIX=$(PREFIX) DESTDIR=$(DESTDIR) scripts/install

deb: build ## Debian packages of the programs and of the kernel module's source, in target/deb
	scripts/deb

rpm: build ## an RPM package of the programs, in target/rpm
	scripts/rpm

static: ## static programs in a tarball, with an SBOM and checksums, in target/static: for any distribution
	scripts/static

reproducible: ## two static builds in different folders, compared: equal bytes; two whole builds
	scripts/static reproduce

release: ## VERSION=x.y.z: version, changelog, commit, tag, packages; DRY_RUN=1 says what it would do
	scripts/release $(if $(DRY_RUN),--dry-run) '$(VERSION)'

clean: ## remove what was built
	$(CARGO) clean
	rm -rf fuzz/target docs/book
