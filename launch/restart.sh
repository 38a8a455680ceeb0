#!/usr/bin/env bash
# Runs a command, and restarts it as its exit status says:
#
#   launch/restart.sh [FLAGS] -- COMMAND...
#
#   75             the run hung, or a device or the storage failed: again
#   76             another process was not there in time: again
#   143            stopped by SIGTERM, everything saved: again
#   134, 137, 139  aborted (another process was lost), killed, crashed: again
#   any other      ends here, with that status: 0 is done, 1 a failure, 2 a mistake of the user's,
#                  130 Ctrl-C
#
# SIGTERM, SIGINT and SIGHUP go on to the command; after them nothing is started again.
#
# A start makes progress when a step is completed that no start before it completed. The run writes the
# number of its newest step to the file that DAPO_PROGRESS names. A start that ends with 76 waited for
# a host that is being repaired, say, and is not one of these.
#
# --most=N           gives up, with status 1, after N starts in a row without progress; 5
# --most_waits=N     gives up, with status 1, after N starts in a row that end with 76; 24, two hours
# --pause_seconds=N  waits this long before it starts again; 10
# --dry_run          prints the command and runs nothing
# --help             prints this
set -euo pipefail
# The command has its own process group, or Ctrl-C would reach it twice.
set -m
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"

most=5 most_waits=24 pause_seconds=10
parse "most most_waits pause_seconds" "" "$@"
[ ${#rest[@]} -gt 0 ] || fail "the command is missing: launch/restart.sh [FLAGS] -- COMMAND..."
need_numbers 1 most most_waits
need_numbers 0 pause_seconds

child='' signal='' interrupted=''

pass_on() {
  signal=$1 interrupted=1
  if [ -n "$child" ]; then kill "-$1" "$child" 2>/dev/null || true; fi
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
trap 'pass_on HUP' HUP # the terminal was closed; nohup makes bash ignore this line

# Sets $status to that of a command. Signals interrupt the wait and do not end it.
run_to_the_end() {
  "$@" &
  child=$!
  # Pass on a signal that came before the child.
  [ -z "$signal" ] || kill "-$signal" "$child" 2>/dev/null || true
  while :; do
    interrupted=''
    if wait "$child"; then status=0; else status=$?; fi
    [ -n "$interrupted" ] || break
  done
  child=''
}

say() { echo "restart.sh: $*" >&2; }

if [ -n "$dry_run" ]; then
  quote "${rest[@]}"
  exit 0
fi
DAPO_PROGRESS=$(mktemp "${TMPDIR:-/tmp}/dapo_progress.XXXXXX")
export DAPO_PROGRESS
trap 'rm -f "$DAPO_PROGRESS"' EXIT
newest=-1 idle_starts=0 waits=0
while :; do
  started=$SECONDS
  run_to_the_end "${rest[@]}"
  lasted=$((SECONDS - started))
  case "$status" in
    75 | 76 | 134 | 137 | 139 | 143) ;;
    *) exit "$status" ;;
  esac
  [ -z "$signal" ] || exit "$status"
  step=$(cat "$DAPO_PROGRESS" 2>/dev/null || true)
  if [ "$status" = 76 ]; then
    waits=$((waits + 1))
  else
    idle_starts=$((idle_starts + 1)) waits=0
  fi
  if [[ "$step" =~ ^[0-9]+$ && "$step" -gt "$newest" ]]; then
    newest=$step idle_starts=0
  fi
  if [ "$idle_starts" -ge "$most" ]; then
    say "status $status after $lasted s: gives up after $idle_starts starts in a row without a new step."
    exit 1
  fi
  if [ "$waits" -ge "$most_waits" ]; then
    say "status $status after $lasted s: gives up, the other processes were not there for $waits starts."
    exit 1
  fi
  say "status $status after $lasted s: starts again in $pause_seconds s."
  run_to_the_end sleep "$pause_seconds"
  [ -z "$signal" ] || exit 143
done
