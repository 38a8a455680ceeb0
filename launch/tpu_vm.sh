#!/usr/bin/env bash
# Trains on a Cloud TPU slice, requested as a queued resource:
#
#   launch/tpu_vm.sh COMMAND FLAGS [-- FLAGS OF launch/train.py]
#
# create  requests the slice
# setup   copies the last commit to all workers, mounts the shared directory, installs
# start   starts launch/train.py on all workers, in launch/restart.sh, as a systemd unit
# status  prints the state of the slice and of the unit on each worker
# tail    follows the output of the first worker
# stop    stops the run: everything is saved, then it ends
# delete  deletes the slice
# run     creates, sets up, starts; deletes and recreates a preempted slice; deletes the slice when
#         the run is done. After a failure it keeps the slice, which costs until delete. Started
#         again, it continues with the slice that exists. It starts what was stopped: end it (Ctrl-C)
#         before stop and delete. All its set-ups copy the commit that was the last when it began
#
# --project=ID             the Google Cloud project
# --zone=ZONE              the zone of the slice, such as us-east5-a
# --name=NAME              of the slice, and of its queued resource
# --accelerator_type=TYPE  the kind and size of the slice: v5p-128 is 64 chips on 16 hosts
# --runtime_version=NAME   the software of its machines: v2-alpha-tpuv5 for v5p
# --nfs=HOST:/SHARE        what is mounted as /shared on every worker; none: it is mounted already
# --spot                   takes a slice that may be preempted
# --reserved               takes it from the project's reservation
# --service_account=EMAIL  account of the workers; default the project's
# --network=NAME           network of the workers; default the project's
# --env=NAME=VALUE         sets a variable for launch/train.py; may be given several times
# --extra=NAME             installs an extra of pyproject.toml too, wandb for example
# --worker=N               whose output tail follows; 0
# --lost_minutes=N         run deletes and recreates a slice whose workers do not all answer; 30
# --delete_on_failure      run deletes the slice also after a failed run or set-up
# --poll_seconds=N         how often run looks at the slice; 60
# --dry_run                prints every command and runs none
# --help                   prints this
#
# Put no secret into --env: all users of the workers can read it. The run gets the variables in the
# file /shared/secrets.env, lines of NAME=VALUE, if there is one.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."

project='' zone='' name='' accelerator_type='' runtime_version='' nfs='' poll_seconds=60
spot='' reserved='' delete_on_failure='' service_account='' network='' extra='' worker=0
lost_minutes=30 archive=/tmp/dapo_jax.tar.gz commit=HEAD

# --quiet: where there is no key for ssh yet, one is made without a question.
workers() { # WORKER COMMAND
  act gcloud compute tpus tpu-vm ssh "$name" "--project=$project" "--zone=$zone" --quiet \
    "--worker=$1" "--command=$2"
}

create() {
  local options=()
  [ -z "$spot" ] || options+=(--spot)
  [ -z "$reserved" ] || options+=(--reserved)
  [ -z "$service_account" ] || options+=("--service-account=$service_account")
  [ -z "$network" ] || options+=("--network=$network")
  act gcloud compute tpus queued-resources create "$name" "--project=$project" "--zone=$zone" \
    "--node-id=$name" "--accelerator-type=$accelerator_type" \
    "--runtime-version=$runtime_version" ${options[@]+"${options[@]}"}
}

# Prints nothing where there is no slice; fails where the list is not available.
slice_state() {
  act gcloud compute tpus queued-resources list "--project=$project" "--zone=$zone" \
    "--filter=name~/$name\$" "--format=value(state.state)"
}

request_error() {
  act gcloud compute tpus queued-resources describe "$name" "--project=$project" "--zone=$zone" \
    "--format=value(state.failedData.error.message)"
}

# The first set-up records the installed versions and later ones install those: a slice recreated in
# the middle of a run must not bring others. umask: a user's number may differ between the workers,
# and file servers compare numbers.
setup() {
  local apt="sudo apt-get -q -o DPkg::Lock::Timeout=600" mount="mountpoint -q /shared"
  local logs="/shared/logs/$name" versions="/shared/logs/$name/versions.txt"
  if [ "$nfs" != none ]; then
    mount="sudo mkdir -p /shared && ($mount || sudo mount -t nfs $(printf %q "$nfs") /shared)\
 && sudo chmod 1777 /shared"
  fi
  warn_of_changes
  act git archive --format=tar.gz --prefix=dapo_jax/ "--output=$archive" "$commit" \
    && act gcloud compute tpus tpu-vm scp "$archive" "$name:" "--project=$project" \
      "--zone=$zone" --quiet --worker=all \
    && workers all "rm -rf dapo_jax && tar -xzf ${archive##*/} && $apt update\
 && $apt install -y nfs-common python3-venv" \
    && workers all "$mount" \
    && workers all "cd dapo_jax && python3 -m venv .uv && .uv/bin/pip install -q uv\
 && umask 0 && mkdir -p $logs && if [ -f $versions ]\
; then .uv/bin/uv venv -q --clear && .uv/bin/uv pip sync -q $versions\
; else .uv/bin/uv sync -q --no-dev --extra gcs --extra tpu${extra:+ --extra $extra}\
 && .uv/bin/uv pip freeze > $versions.\$(hostname) && mv $versions.\$(hostname) $versions; fi"
}

# A systemd unit outlives the connection, passes on the SIGTERM of a shutdown, and waits for the end
# of a step and the checkpoint; the network and /shared are there until then. Where Linux kills a
# process for lack of memory, restart.sh is to go on, which OOMPolicy=stop, the default, would end.
# libtpu maps the chips into locked memory, so its limit is lifted. The output goes to the shared
# directory, which outlives the slice.
start() {
  local logs="/shared/logs/$name" command='' argument variable options
  options="--unit=dapo --uid=\$(id -u) --working-directory=\$HOME/dapo_jax --remain-after-exit"
  for variable in KillMode=mixed TimeoutStopSec=3600 SuccessExitStatus=143 OOMPolicy=continue \
    LimitMEMLOCK=infinity LimitNOFILE=1048576 UMask=0000 EnvironmentFile=-/shared/secrets.env \
    RequiresMountsFor=/shared After=network-online.target "StandardOutput=append:$logs/\$(hostname).log" \
    "StandardError=append:$logs/\$(hostname).log"; do
    options+=" --property=$variable"
  done
  for variable in "${shared_env[@]}" ${env[@]+"${env[@]}"}; do
    options+=" --setenv=$(printf %q "$variable")"
  done
  for argument in .venv/bin/python launch/train.py "${rest[@]}"; do
    command+=" $(printf %q "${argument//\$/$dollar}")"
  done
  workers all "umask 0 && mkdir -p $logs && (sudo systemctl reset-failed dapo 2>/dev/null || true)\
 && sudo systemd-run $options \$HOME/dapo_jax/launch/restart.sh --$command"
}

unit_states() { # a line per worker: status ACTIVE SUB EXIT HOST
  local show="systemctl show dapo --value --property"
  workers all "echo status \$($show=ActiveState) \$($show=SubState) \$($show=ExecMainStatus)\
 \$(hostname)"
}

tail_log() { workers "$worker" "tail -n 100 -F /shared/logs/$name/\$(hostname).log"; }

stop() { workers all "sudo systemctl stop dapo 2>/dev/null || true"; }

delete() {
  act gcloud compute tpus queued-resources delete "$name" "--project=$project" "--zone=$zone" \
    --force --quiet
}

note() { echo "tpu_vm.sh: $*" >&2; }

# Runs a step; after five failures in a row the run has ended.
try() {
  if "$@"; then
    failures=0
    return
  fi
  failures=$((failures + 1))
  note "$1 failed, $failures times in a row."
  [ "$failures" -lt 5 ] || ended=1
}

begin() { stop && setup && start; }

discard() {
  seen='' silent_since=''
  try delete
}

# Looks at the slice once and acts. Returns 1 while there is more to do; at the end $ended is the
# status of the run, and $failed_host a worker where it failed.
advance() {
  local state states failed
  if ! state=$(slice_state); then
    [ -n "$looked" ] || fail "the slices of --project=$project --zone=$zone cannot be listed."
    note "the state of the slice is not available."
    return 1
  fi
  looked=1
  case "$state" in
    '')
      if [ -n "$seen" ]; then
        note "the slice $name was deleted from elsewhere: the run is not started again."
        exit 1
      fi
      note "there is no slice $name: it is requested."
      try create
      ;;
    SUSPENDED | FAILED)
      if [ "$state" = FAILED ]; then
        failed_requests=$((failed_requests + 1))
        note "the request failed, $failed_requests times in a row: $(request_error || true)"
        if [ "$failed_requests" -ge 5 ]; then
          ended=1
          return
        fi
      fi
      note "the slice is $state: it is deleted and requested again."
      discard
      ;;
    ACTIVE)
      failed_requests=0 seen=1
      if ! states=$(unit_states | grep -o 'status .*'); then
        note "not all workers answer."
        silent_since=${silent_since:-$SECONDS}
        [ $((SECONDS - silent_since)) -ge $((60 * lost_minutes)) ] || return 1
        note "so it was for $lost_minutes minutes: the slice is deleted and requested again."
        discard
        [ -n "$ended" ]
        return
      fi
      silent_since=''
      failed=$(awk '$2 == "failed" { print $4, $5; exit }' <<<"$states")
      if [ -n "$failed" ]; then
        ended=${failed%% *} failed_host=${failed#* }
      elif grep -q '^status inactive' <<<"$states"; then
        # A new slice, or a worker that was restarted and has forgotten its unit.
        note "the run is started."
        try begin
      elif ! grep -qv '^status active exited' <<<"$states"; then
        ended=0
      else
        failures=0
      fi
      ;;
    *) note "the slice is $state." ;;
  esac
  [ -n "$ended" ]
}

run() {
  ended='' failures=0 failed_requests=0 looked='' seen='' silent_since='' failed_host=''
  if [ -n "$dry_run" ]; then
    note "the commands of an uninterrupted run; the states are read every $poll_seconds s."
    slice_state && create && slice_state && unit_states && begin
    unit_states && stop && delete
    return
  fi
  commit=$(git rev-parse HEAD)
  until advance; do sleep "$poll_seconds"; done
  note "the run has ended with status $ended; its output is in /shared/logs/$name."
  if [ -n "$failed_host" ]; then
    note "the last lines of $failed_host:"
    workers "$worker" "tail -n 30 /shared/logs/$name/$failed_host.log" >&2 || true
  fi
  stop || note "not all workers answer; what is left of the run ends with the slice."
  if [ "$ended" = 0 ] || [ -n "$delete_on_failure" ]; then
    delete
  else
    note "the slice is kept, and costs until: launch/tpu_vm.sh delete --project=$project" \
      "--zone=$zone --name=$name"
  fi
  exit "$ended"
}

command=${1:-}
case "$command" in
  --help | -h) usage && exit 0 ;;
  create | setup | start | status | tail | stop | delete | run) shift ;;
  *) fail "a command is needed: create, setup, start, status, tail, stop, delete or run." ;;
esac
parse "project zone name accelerator_type runtime_version nfs service_account network poll_seconds \
lost_minutes worker extra env" \
  "spot reserved delete_on_failure" "$@"
need_numbers 0 poll_seconds lost_minutes worker
need project zone
need_name "$name"
if [ -z "$dry_run" ]; then # two launches at once must not share the file
  archive=$(mktemp -d)/dapo_jax.tar.gz
  trap 'rm -rf "${archive%/*}"' EXIT
fi
[ -z "$spot" ] || [ -z "$reserved" ] || fail "--spot and --reserved exclude each other."
case "$command" in create | run) need accelerator_type runtime_version ;; esac
case "$command" in setup | run) need nfs ;; esac
case "$command" in start | run) need_train_flags /shared/ ;; esac
case "$command" in
  status) slice_state && unit_states ;;
  tail) tail_log ;;
  *) "$command" ;;
esac
