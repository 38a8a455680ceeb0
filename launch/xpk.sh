#!/usr/bin/env bash
# Trains on a TPU slice of Google Kubernetes Engine. xpk makes the cluster and its storage; the run
# is a JobSet, launch/jobset.yaml:
#
#   launch/xpk.sh COMMAND FLAGS [-- FLAGS OF launch/train.py]
#
# create    makes the cluster with one slice, and storage for /shared
# setup     builds the image of the last commit and pushes it
# manifest  prints the filled JobSet
# start     applies it; a JobSet of this name that has ended is replaced
# status    prints the JobSet and its pods
# tail      follows the output of the first process
# stop      deletes the JobSet: everything is saved, then the pods end
# delete    deletes the cluster; the storage is left
# run       sets up, creates, starts, waits for the end and deletes. The JobSet and, in each pod,
#           launch/restart.sh restart the run meanwhile
#
# --project=ID         the Google Cloud project
# --zone=ZONE          the zone of the slice, such as us-east5-a
# --cluster=NAME       of the cluster
# --name=NAME          of the JobSet
# --tpu_type=TYPE      the kind and size of the slice for xpk: v5p-128 is 64 chips on 16 hosts
# --accelerator=NAME   the same kind as GKE calls it: tpu-v5p-slice
# --topology=SHAPE     the same size as GKE calls it: 4x4x4
# --chips_per_host=N   chips of one host; 4
# --image=NAME         the image with its registry, which the cluster must be able to read
# --storage=NAME       of the storage in the cluster, mounted as /shared in every pod
# --storage_gb=N       the size of that storage in GB
# --storage_tier=TIER  of Filestore; ZONAL
# --attach             uses the storage of an earlier cluster, which is left when that is deleted
# --extra=NAME         the image has an extra of pyproject.toml too, wandb for example
# --spot               takes a slice that may be preempted
# --on_demand          takes one at the full price
# --reservation=NAME   takes it from that reservation
# --max_restarts=N     how often the JobSet may be recreated; 100
# --env=NAME=VALUE     sets a variable for launch/train.py; may be given several times
# --dry_run            prints every command and runs none
# --help               prints this
#
# Put no secret into --env: it can be read in the cluster. The run gets the variables of the
# Kubernetes secret that has the JobSet's name, if there is one.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
cd "$(dirname "$0")/.."

project='' zone='' cluster='' name='' tpu_type='' accelerator='' topology='' chips_per_host=4
image='' storage='' storage_gb='' storage_tier=ZONAL max_restarts=100
spot='' on_demand='' reservation='' attach='' extra=''

create() {
  local capacity=--spot place=("--cluster=$cluster" "--project=$project" "--zone=$zone")
  [ -z "$on_demand" ] || capacity=--on-demand
  [ -z "$reservation" ] || capacity="--reservation=$reservation"
  act xpk cluster create "${place[@]}" "--tpu-type=$tpu_type" --num-slices=1 "$capacity" \
    --enable-gcpfilestore-csi-driver
  place+=(--type=gcpfilestore --vol=shared --access-mode=ReadWriteMany --mount-point=/shared
    --readonly=false --auto-mount=false)
  if [ -n "$attach" ]; then
    act xpk storage attach "$storage" "${place[@]}"
  else
    act xpk storage create "$storage" "${place[@]}" "--size=$storage_gb" "--tier=$storage_tier"
  fi
}

# Of a commit, not of the directory: the image has nothing that is not in the repository.
setup() {
  warn_of_changes
  local build=(docker build --platform=linux/amd64 --build-arg=ACCELERATOR=tpu)
  build+=(${extra:+"--build-arg=EXTRA=$extra"} "--tag=$image" -)
  if [ -n "$dry_run" ]; then
    echo "git archive HEAD | $(quote "${build[@]}")"
  else
    git archive HEAD | "${build[@]}"
  fi
  act docker push "$image"
}

json() { # prints the arguments as JSON strings, separated by commas
  local text line=''
  for text in "$@"; do
    text=${text//'$'/$dollar}
    text=${text//\\/\\\\}
    text=${text//$'\n'/\\n}
    text=${text//\"/\\\"}
    line+=", \"$text\""
  done
  echo "${line#, }"
}

# shellcheck disable=SC2016 # the names in the template are to stay as they are
manifest() {
  local text variables='' variable command
  for variable in "${shared_env[@]}" ${env[@]+"${env[@]}"}; do
    variables+=", {\"name\": $(json "${variable%%=*}"), \"value\": $(json "${variable#*=}")}"
  done
  command=$(json "${rest[@]}")
  text=$(<launch/jobset.yaml)
  text=${text//'${NAME}'/"$name"}
  text=${text//'${HOSTS}'/"$((chips / chips_per_host))"}
  text=${text//'${CHIPS_PER_HOST}'/"$chips_per_host"}
  text=${text//'${ACCELERATOR}'/"$accelerator"}
  text=${text//'${TOPOLOGY}'/"$topology"}
  text=${text//'${IMAGE}'/"$image"}
  text=${text//'${CLAIM}'/"$storage-pvc"}
  text=${text//'${MAX_RESTARTS}'/"$max_restarts"}
  text=${text//'${VARIABLES}'/"[${variables#, }]"}
  text=${text//'${TRAIN_FLAGS}'/"[$command]"}
  echo "$text"
}

# Precedes each kubectl, so that its cluster does not depend on earlier commands.
credentials() {
  act gcloud container clusters get-credentials "$cluster" "--project=$project" \
    "--location=${zone%-*}" --dns-endpoint
}

start() {
  local earlier=(kubectl get "jobset/$name" --ignore-not-found) ended
  earlier+=("--output=jsonpath={.status.terminalState}")
  credentials
  if [ -n "$dry_run" ]; then
    act "${earlier[@]}"
    echo "$(quote launch/xpk.sh manifest ${given[@]+"${given[@]}"}) | kubectl apply --filename=-"
  else
    ended=$("${earlier[@]}")
    if [ -n "$ended" ]; then # kubectl apply would leave it as it is
      echo "xpk.sh: the JobSet $name of an earlier start has ended ($ended), and is replaced." >&2
      stop
    fi
    manifest | kubectl apply --filename=-
  fi
}

status() {
  credentials
  act kubectl get "jobset/$name"
  act kubectl get pods "--selector=jobset.sigs.k8s.io/jobset-name=$name" --output=wide
}

tail_log() {
  credentials
  act kubectl logs --follow --tail=100 \
    "--selector=jobset.sigs.k8s.io/jobset-name=$name,batch.kubernetes.io/job-completion-index=0"
}

stop() {
  credentials
  # In the foreground: it waits for the pods, which save.
  act kubectl delete "jobset/$name" --ignore-not-found --cascade=foreground
}

delete() {
  act xpk cluster delete "--cluster=$cluster" "--project=$project" "--zone=$zone" --quiet
}

# The JobSet restarts by itself: wait for its end. kubectl takes a negative time limit as a week. Each
# step on a line of its own: bash ignores failures within a list with &&.
run() {
  local end=(kubectl get "jobset/$name" "--output=jsonpath={.status.terminalState}") state='' found
  setup
  trap 'echo "xpk.sh: a step failed. The cluster, if it is there, costs until: launch/xpk.sh delete" \
    "--project=$project --zone=$zone --cluster=$cluster" >&2' EXIT
  create
  start
  if [ -n "$dry_run" ]; then
    act kubectl wait "jobset/$name" "--for=jsonpath={.status.terminalState}" --timeout=-1s
    act "${end[@]}"
  else
    until [ -n "$state" ]; do
      kubectl wait "jobset/$name" "--for=jsonpath={.status.terminalState}" --timeout=-1s || true
      if found=$(kubectl get "jobset/$name" --ignore-not-found --output=name) && [ -z "$found" ]; then
        state=deleted
      else
        state=$("${end[@]}") || sleep 60
      fi
    done
    echo "xpk.sh: the run has ended: $state." >&2
    # With the JobSet its logs go.
    [ "$state" = Completed ] || kubectl logs "--selector=jobset.sigs.k8s.io/jobset-name=$name" \
      --prefix --tail=30 --max-log-requests=1000 >&2 || true
  fi
  stop || true # the cluster goes with it
  delete
  trap - EXIT
  [ -n "$dry_run" ] || [ "$state" = Completed ]
}

command=${1:-}
case "$command" in
  --help | -h) usage && exit 0 ;;
  create | setup | manifest | start | status | tail | stop | delete | run) shift ;;
  *) fail "a command is needed: create, setup, manifest, start, status, tail, stop, delete or run." ;;
esac
given=() before=1 # --dry_run after -- belongs to launch/train.py
for argument in "$@"; do
  [ "$argument" != -- ] || before=''
  [ -n "$before" ] && [ "$argument" = --dry_run ] || given+=("$argument")
done
parse "project zone cluster name tpu_type accelerator topology chips_per_host image storage storage_gb \
storage_tier reservation max_restarts extra env" "spot on_demand attach" "$@"
need_numbers 1 chips_per_host storage_gb
need_numbers 0 max_restarts
case "$command" in setup | manifest) ;; *) need project zone cluster ;; esac
case "$command" in
  create | run)
    need tpu_type storage storage_gb
    [ "$spot$on_demand${reservation:+1}" = 1 ] \
      || fail "one of --spot, --on_demand and --reservation=NAME is needed: what is paid for."
    ;;
esac
case "$command" in setup | manifest | start | run) need image ;; esac
case "$command" in manifest | start | status | tail | stop | run) need_name "$name" ;; esac
case "$command" in
  manifest | start | run)
    need accelerator topology storage
    [[ "$topology" =~ ^[1-9][0-9]*(x[1-9][0-9]*)+$ ]] \
      || fail "--topology must be a shape such as 4x4x4; got '$topology'."
    chips=$((${topology//x/*}))
    [ $((chips % chips_per_host)) = 0 ] || fail "--chips_per_host=$chips_per_host does not divide" \
      "the $chips chips of --topology=$topology: a part of a host cannot be had."
    need_train_flags /shared/
    ;;
esac
case "$command" in
  tail) tail_log ;;
  *) "$command" ;;
esac
