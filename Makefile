# Everything a contributor runs. "make" alone lists it.

GOLANGCI_LINT ?= go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOTESTSUM     ?= go run gotest.tools/gotestsum@v1.13.0
BENCHSTAT     ?= go run golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da

# More arguments for go test, such as TESTFLAGS='-run TestRouter -v', and for make bench and bench-large.
TESTFLAGS  ?=
BENCHFLAGS ?= -benchtime=2s

# How often make bench runs all benchmarks. benchstat gives an interval and a p-value from 6 on.
BENCHCOUNT ?= 6

# How long make chaos runs: a round takes about two minutes on two cores.
CHAOS_ROUNDS ?= 20

# The root module has no dependency but Watermill; what needs more is a module of its own.
MODULES := $(dir $(wildcard go.mod amqpmessage/go.mod examples/go.mod integration/go.mod))

SERVICES_DIR := $(or $(IDEMPOTENCY_SERVICES_DIR),$(CURDIR)/.services)

# $(call each,COMMAND) runs a command in every module, stops at no failure and fails if any did.
each = @failed=0; for module in $(MODULES); do echo "--- $$module: $(1)"; (cd $$module && $(1)) || failed=1; done; exit $$failed

# $(call run-tests,FLAGS) runs the tests of all modules as one run, so that the
# failures and the totals of all of them are what is printed last.
define run-tests
$(GOTESTSUM) --format pkgname-and-test-fails --format-hide-empty-pkg \
	--post-run-command 'sh -c "echo; echo $$((TESTS_TOTAL - TESTS_FAILED - TESTS_SKIPPED)) passed, $$((TESTS_FAILED + TESTS_ERRORS)) failed, $$TESTS_SKIPPED skipped"' \
	--raw-command -- sh -c 'failed=0; for module in $(MODULES); do (cd $$module && go test -json -count=1 -timeout 20m $(1) $(TESTFLAGS) ./...) || failed=1; done; exit $$failed'
endef

.DEFAULT_GOAL := help

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Run the quickstart: a duplicate arrives, the handler does not run twice. Needs no server.
	cd examples && go run ./quickstart

.PHONY: test
test: services ## Start the services, then run all tests of all modules with the race detector.
	@. '$(SERVICES_DIR)/env' && $(call run-tests,-race)

.PHONY: test-short
test-short: ## Run the tests that need no server.
	@$(call run-tests,-race -short)

# With servers of its own, which it restarts, and removes. 20 rounds are more than 1,000 kills.
.PHONY: chaos
chaos: ## Kill consumers and restart servers for CHAOS_ROUNDS rounds; CHAOS_SEED repeats one.
	cd integration && CHAOS_ROUNDS=$(CHAOS_ROUNDS) go test -race -count=1 -timeout 4h -v $(TESTFLAGS) ./chaos

# All benchmarks run in turn, BENCHCOUNT times, so that what changes on the machine meanwhile changes all of them.
.PHONY: bench
bench: SHELL := bash
bench: services ## Run the benchmarks BENCHCOUNT times against the services, then compare the implementations.
	@set -eo pipefail; . '$(SERVICES_DIR)/env'; : >'$(SERVICES_DIR)/bench.txt'; \
	for ((i = 1; i <= $(BENCHCOUNT); i++)); do \
		echo "--- run $$i of $(BENCHCOUNT)"; \
		(cd integration && go test -run '^$$' -bench . -skip Large $(BENCHFLAGS) ./bench/...) | tee -a '$(SERVICES_DIR)/bench.txt'; \
	done; \
	$(BENCHSTAT) '$(SERVICES_DIR)/bench.txt'

.PHONY: bench-large
bench-large: services ## Measure claims beside up to 50 million records, and purging (hours; IDEMPOTENCY_BENCH_RECORDS="0 1000000" for less).
	@. '$(SERVICES_DIR)/env'; cd integration && go test -run '^$$' -bench Large -timeout 6h $(BENCHFLAGS) ./bench

.PHONY: model
model: ## Check a model of the protocol, and that each broken protocol is refuted. Needs spin.
	@docs/model/check.sh

# A regular expression of what to take out; all by default.
MUTANTS ?=

.PHONY: mutate
mutate: services ## Take each safety out of the library, one at a time, and run the test that must notice.
	@. '$(SERVICES_DIR)/env'; cd integration && go run ./mutants -run '$(MUTANTS)'

# How many inputs each target gets. A time, such as 30s, is taken as well, but may end a target with "context deadline exceeded".
FUZZTIME ?= 100000x

.PHONY: fuzz
fuzz: SHELL := bash
fuzz: ## Fuzz each target with FUZZTIME inputs.
	@set -e; for file in $$(grep -rl --include='*_test.go' '^func Fuzz' .); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z]*\)(.*/\1/p' "$$file"); do \
			echo "--- $$file: $$target"; \
			(cd "$$(dirname "$$file")" && go test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) .); \
		done; \
	done

.PHONY: lint
lint: ## Run go vet and golangci-lint in all modules.
	$(call each,go vet ./...)
	$(call each,$(GOLANGCI_LINT) run --config $(CURDIR)/.golangci.yml ./...)

.PHONY: fmt
fmt: ## Format all modules.
	$(call each,$(GOLANGCI_LINT) fmt --config $(CURDIR)/.golangci.yml ./...)

.PHONY: tidy
tidy: ## Tidy go.mod and go.sum of all modules.
	$(call each,go mod tidy)

.PHONY: verify
verify: ## Check that all modules are tidy and formatted, and change nothing.
	$(call each,go mod tidy -diff)
	$(call each,$(GOLANGCI_LINT) fmt --diff --config $(CURDIR)/.golangci.yml ./...)

.PHONY: services
services: ## Start PostgreSQL, RabbitMQ and Kafka, as containers or as processes (see integration/services/start.sh).
	@integration/services/start.sh

.PHONY: services-down
services-down: ## Stop the services and remove their data.
	@integration/services/stop.sh --purge
