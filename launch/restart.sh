#!/usr/bin/env bash
# Runs a command, and restarts it as its exit status says:
#
#   launch/restart.sh [FLAGS] -- COMMAND...
#
#   75             the run hung, or a device or the storage failed: again
#   143            stopped by SIGTERM, everything saved: again
#   134, 137, 139  aborted (another process was lost), killed, crashed: again
#   any other      ends here, with that status: 0 is done, 1 a failure, 2 a mistake of the user's,
#                  130 Ctrl-C
#
# SIGTERM and SIGINT go on to the command; after them nothing is started again.
#
# A start makes progress when a step is completed that no start before it completed. The run writes the
# number of its newest step to the file that DAPO_PROGRESS names.
#
# --most=N           gives up, with status 1, after N starts in a row without progress; 5
# --pause_seconds=N  waits this long before it starts again; 10
# --dry_run          prints the command and runs nothing
# --help             prints this
set -euo pipefail
# The command has its own process group, or Ctrl-C would reach it twice.
set -m
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"

most=5 pause_seconds=10
parse "most pause_seconds" "" "$@"
[ ${#rest[@]} -gt 0 ] || fail "the command is missing: launch/restart.sh [FLAGS] -- COMMAND..."
need_numbers 1 most
need_numbers 0 pause_seconds

child='' signal='' interrupted=''

pass_on() {
  signal=$1 interrupted=1
  if [ -n "$child" ]; then kill "-$1" "$child" 2>/dev/null || true; fi
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

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
newest=-1 idle_starts=0
while :; do
  started=$SECONDS
  run_to_the_end "${rest[@]}"
  lasted=$((SECONDS - started))
  case "$status" in
    75 | 134 | 137 | 139 | 143) ;;
    *) exit "$status" ;;
  esac
  [ -z "$signal" ] || exit "$status"
  step=$(cat "$DAPO_PROGRESS" 2>/dev/null || true)
  idle_starts=$((idle_starts + 1))
  if [[ "$step" =~ ^[0-9]+$ && "$step" -gt "$newest" ]]; then
    newest=$step idle_starts=0
  fi
  if [ "$idle_starts" -ge "$most" ]; then
    say "status $status after $lasted s: gives up after $idle_starts starts in a row without a new step."
    exit 1
  fi
  say "status $status after $lasted s: starts again in $pause_seconds s."
  run_to_the_end sleep "$pause_seconds"
  [ -z "$signal" ] || exit 143
done
