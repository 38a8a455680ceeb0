#!/usr/bin/env bash
# Runs a command, and runs it again for as long as its exit status says so:
#
#   launch/restart.sh [FLAGS] -- COMMAND...
#
#   75             another process was lost or hung: again
#   143            stopped by SIGTERM, everything saved: again
#   134, 137, 139  aborted, killed, crashed: again
#   any other      ends here, with that status: 0 is done, 1 a failure, 2 a mistake of the user's,
#                  130 Ctrl-C
#
# SIGTERM and SIGINT go on to the command; after them nothing is started again.
#
# --most=N           gives up, with status 1, after N starts in a row that were short; 5
# --short_seconds=N  a start that lasted less than this was short; 60
# --pause_seconds=N  waits this long before it starts again; 10
# --dry_run          prints the command and runs nothing
# --help             prints this
set -euo pipefail
# A group of its own for the command, or Ctrl-C would reach it twice: from the terminal and from here.
set -m
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"

most=5 short_seconds=60 pause_seconds=10
parse "most short_seconds pause_seconds" "" "$@"
[ ${#rest[@]} -gt 0 ] || fail "the command is missing: launch/restart.sh [FLAGS] -- COMMAND..."
need_numbers 0 most short_seconds pause_seconds

child='' signal='' interrupted=''

pass_on() {
  signal=$1 interrupted=1
  if [ -n "$child" ]; then kill "-$1" "$child" 2>/dev/null || true; fi
}
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

# The status of a command that signals may interrupt the wait for, but not end.
run_to_the_end() {
  "$@" &
  child=$!
  # A signal that came before there was a child is still to be passed on.
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
short_starts=0
while :; do
  started=$SECONDS
  run_to_the_end "${rest[@]}"
  lasted=$((SECONDS - started))
  case "$status" in
    75 | 134 | 137 | 139 | 143) ;;
    *) exit "$status" ;;
  esac
  [ -z "$signal" ] || exit "$status"
  if [ "$lasted" -lt "$short_seconds" ]; then
    short_starts=$((short_starts + 1))
  else
    short_starts=0
  fi
  if [ "$short_starts" -ge "$most" ]; then
    say "status $status after $lasted s: gives up after $short_starts short starts in a row."
    exit 1
  fi
  say "status $status after $lasted s: starts again in $pause_seconds s."
  run_to_the_end sleep "$pause_seconds"
  [ -z "$signal" ] || exit 143
done
