#!/usr/bin/env bash
# Checks the model of the protocol with spin: as it is, where nothing may be
# refuted, and with one change after the other, which must all be refuted. It
# prints a table, and fails if it is not so. README.md explains the columns.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# One run in a line: its name, what is given to the preprocessor, and what to the compiler of the checker.
# All states are visited and kept: no partial order reduction, no hashing without the states.
sound=(
	'one-event    -DSCENARIO=1             -DSAFETY'
	'two-events   -DSCENARIO=2,-DREPLAYS=0 -DSAFETY'
	'cycles       -DFAULTS=1,-DREPLAYS=0  -DNP'
)
changes=(
	PUBLISH_BEFORE_COMMIT ACK_BEFORE_COMMIT ACK_ON_ERROR COMMIT_ON_ERROR
	CHECK_THEN_INSERT CLAIM_APART IN_FLIGHT_AS_DUPLICATE ERROR_AS_DUPLICATE NO_FINGERPRINT
	UNKNOWN_AS_SUCCESS ROLLBACK_AS_SUCCESS
	NOTHING_STORED STORED_APART NEW_UUID
	REMOVED_BEFORE_PUBLISH REMOVED_ON_NACK NOT_REMOVED NO_ACKED_CHECK
	PURGED_EARLY PURGED_UNACKED NO_HORIZON HORIZON_BEFORE_CLAIM
)

command -v spin >/dev/null && command -v gcc >/dev/null || {
	echo 'check.sh needs spin and gcc: on Debian and Ubuntu, apt-get install spin gcc libc6-dev' >&2
	exit 1
}

# check NAME DEFINES CFLAGS leaves what the checker says in NAME/out.
check() {
	mkdir -p "$dir/$1"
	cp protocol.pml "$dir/$1"
	(
		cd "$dir/$1"
		IFS=,
		# shellcheck disable=SC2086
		spin $2 -a protocol.pml
		# shellcheck disable=SC2086
		gcc -w -O1 -DNOREDUCE $3 -o pan pan.c
		unset IFS
		arguments=(-m10000)
		[[ $3 == *-DNP* ]] && arguments+=(-l) # look for cycles
		TIMEFORMAT='processor time %U s'
		time ./pan "${arguments[@]}"
	) >"$dir/$1/out" 2>&1 || true
}
if [ "${1-}" = check ]; then
	dir=$2
	check "$3" "$4" "$5"
	exit
fi

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
{
	printf '%s\n' "${sound[@]}"
	# The shortest way into the fault: breadth first.
	printf '%s -DFAULTS=1,-D%s -DSAFETY,-DBFS\n' $(for change in "${changes[@]}"; do echo "$change" "$change"; done)
} | xargs -P "$(nproc)" -L 1 ./check.sh check "$dir"

failed=0
# row NAME WANTED prints a line of the table: WANTED is holds or refuted.
row() {
	local out=$dir/$1/out states steps seconds verdict why=''
	states=$(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' "$out" | head -n 1)
	seconds=$(sed -n 's/^processor time \([0-9.]*\) s/\1/p' "$out")
	if grep -q '^pan:1: assertion violated' "$out"; then
		verdict=refuted
		why=$(sed -n 's/^pan:1: assertion violated \(.*\) (at depth \([0-9]*\))/after \2 steps: \1/p' "$out")
	elif grep -q 'errors: 0$' "$out" && ! grep -qiE 'not completed|too small|out of memory|error:' "$out"; then
		verdict=holds
	else
		verdict=failed
		why=$(grep -m 1 -E '^pan|rror' "$out" || true)
	fi
	[ "$verdict" = "$2" ] || {
		failed=1
		why="WANTED: $2. $why"
	}
	printf '%-24s %9s %6s s  %-8s %s\n' "$1" "$states" "$seconds" "$verdict" "$why"
}

printf '%-24s %9s %8s  %s\n' '' states time verdict
for run in "${sound[@]}"; do row "${run%% *}" holds; done
for change in "${changes[@]}"; do row "$change" refuted; done

# unreached NAME prints the statements that no run of the checker reached, but the ends of processes that have none.
unreached() { sed -n 's/^\tprotocol.pml:\([0-9]*\), state [0-9]*, \(".*"\)$/line \1: \2/p' "$dir/$1/out" | grep -v -e '"-end-"' | sort -u; }
dead=$(comm -12 <(unreached one-event) <(unreached two-events))
if [ -n "$dead" ]; then
	printf '\nNo run reaches these statements of the model:\n%s\n' "$dead"
	failed=1
fi
exit "$failed"
