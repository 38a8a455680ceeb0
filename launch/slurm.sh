#!/usr/bin/env bash
#SBATCH --job-name=dapo
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Trains on the GPUs of a Slurm cluster:
#
#   launch/slurm.sh FLAGS -- FLAGS OF launch/train.py
#
# submits itself with sbatch. The job runs launch/train.py on all nodes with srun, each process in
# launch/restart.sh. The checkout, its .venv and --workdir must be on a file system that all nodes
# see. Before the time limit everything is saved and the job is requeued, as after a failed node or a
# preemption. After scancel it ends. Inside a job, as in the shell of salloc, it submits nothing and
# trains in that job.
#
# --nodes=N                  nodes of the job
# --gpus_per_node=N          GPUs of a node
# --cpus_per_process=N       processor cores of a process; the rewards are worked out on them
# --processes_per_node=N     the number of GPUs (default), or 1
# --time=HH:MM:SS            time limit of the job; default the partition's
# --grace_seconds=N          how long before the time limit the run is stopped; 600
# --partition=NAME           default the cluster's
# --account=NAME             who pays; default the user's
# --compilation_cache=DIR    compiled programs, seen by all nodes; default .jax_cache in the checkout
# --env=NAME=VALUE           sets a variable for launch/train.py; may be given several times
# --dry_run                  prints every command and runs none
# --help                     prints this
#
# Put no secret into --env: other users see it. Variables of the shell that submits are the job's too.
set -euo pipefail
# Slurm runs a copy of this file from elsewhere; the job starts where it was submitted.
here=$(dirname "$0")
[ -f "$here/common.sh" ] || here=${SLURM_SUBMIT_DIR:-.}/launch
[ -f "$here/common.sh" ] || { echo "error: start launch/slurm.sh from the checkout." >&2; exit 2; }
# shellcheck source=launch/common.sh
source "$here/common.sh"
cd "$here/.."

nodes='' gpus_per_node='' cpus_per_process='' processes_per_node='' time='' partition='' account=''
compilation_cache=.jax_cache grace_seconds=600

submit() {
  local options=()
  [ -z "$time" ] || options+=("--time=$time")
  [ -z "$partition" ] || options+=("--partition=$partition")
  [ -z "$account" ] || options+=("--account=$account")
  act sbatch "--nodes=$nodes" "--gpus-per-node=$gpus_per_node" \
    "--ntasks-per-node=$processes_per_node" "--cpus-per-task=$cpus_per_process" \
    "--signal=B:USR1@$grace_seconds" ${options[@]+"${options[@]}"} launch/slurm.sh ${given[@]+"${given[@]}"}
}

# Sets $train. JAX gives each process the GPU of its number on the node; all GPUs must be visible to
# it, so Slurm must not bind any. A restart.sh that ends with a status other than 0 ends the others.
train_command() {
  local variables=("JAX_COMPILATION_CACHE_DIR=$compilation_cache") ids
  if [ "$processes_per_node" != "$gpus_per_node" ]; then
    ids=$(seq -s , 0 $((gpus_per_node - 1)))
    variables+=("JAX_LOCAL_DEVICE_IDS=${ids%,}")
  fi
  train=(env "${variables[@]}" ${env[@]+"${env[@]}"} srun "--nodes=$nodes"
    "--ntasks-per-node=$processes_per_node" "--cpus-per-task=$cpus_per_process"
    "--gpus-per-node=$gpus_per_node" --gpu-bind=none --kill-on-bad-exit=1
    launch/restart.sh -- .venv/bin/python launch/train.py "${rest[@]}")
}

# Trains, and requeues the job if the signal before the time limit stopped the run. scancel sends
# SIGTERM to the processes of the job step; srun would kill them. After scancel of the whole job Slurm
# itself sends it to them.
job() {
  local status interrupted='' again='' child=''
  trap 'interrupted=1 again=1; act scancel --signal=TERM "$SLURM_JOB_ID"' USR1
  trap 'interrupted=1' TERM
  "${train[@]}" &
  child=$!
  while :; do
    interrupted=''
    if wait "$child"; then status=0; else status=$?; fi
    [ -n "$interrupted" ] || break
  done
  case "$again$status" in 175 | 176 | 1134 | 1137 | 1139 | 1143) act scontrol requeue "$SLURM_JOB_ID" ;; esac
  exit "$status"
}

given=() before=1 # --dry_run after -- belongs to launch/train.py
for argument in "$@"; do
  [ "$argument" != -- ] || before=''
  [ -n "$before" ] && [ "$argument" = --dry_run ] || given+=("$argument")
done
parse "nodes gpus_per_node cpus_per_process processes_per_node time partition account \
compilation_cache grace_seconds env" "" "$@"
need nodes gpus_per_node cpus_per_process
processes_per_node=${processes_per_node:-$gpus_per_node}
need_numbers 1 nodes gpus_per_node cpus_per_process grace_seconds
[ "$processes_per_node" = 1 ] || [ "$processes_per_node" = "$gpus_per_node" ] \
  || fail "--processes_per_node must be 1 or --gpus_per_node ($gpus_per_node);" \
    "got '$processes_per_node'."
need_train_flags ''
train_command
if [ -n "$dry_run" ]; then
  submit
  quote "${train[@]}"
elif [ -n "${SLURM_JOB_ID:-}" ]; then
  job
else
  submit
fi
