# shellcheck shell=bash
# Sourced by the launchers: their flags, their errors, and commands that a dry run only prints.
# Written for bash 3.2 too, which is what macOS has.

# With it, cd goes elsewhere and prints where.
unset CDPATH

dry_run='' # set by --dry_run
rest=()    # what follows --
# What stands for a $ in the arguments of a command: Kubernetes replaces $(NAME), systemd ${NAME}.
# shellcheck disable=SC2034 # read by the launchers
dollar='$$'
# Variables of launch/train.py: caches of compiled programs, and of the hub's weights and data, that
# all hosts share. Each --env adds one.
# shellcheck disable=SC2034 # read by the launchers
shared_env=(JAX_COMPILATION_CACHE_DIR=/shared/jax_cache HF_HOME=/shared/huggingface)
env=()
# The launchers change directory before they print their help.
self=$(cd "$(dirname "$0")" && pwd)/${0##*/}

fail() {
  echo "error: $*" >&2
  exit 2
}

# The hosts get the last commit. A dry run calls no program.
warn_of_changes() {
  if [ -z "$dry_run" ] && [ -n "$(git status --porcelain)" ]; then
    echo "warning: changes that are not committed do not run (git status lists them)." >&2
  fi
}

# The comment at the head of the script is its help.
usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 && !/^#SBATCH/ { sub(/^# ?/, ""); print }' "$self"; }

# parse "names that take a value" "names of switches" ARGUMENT...
# Sets the variable of each flag's name; a given switch becomes 1. Local names end in _, so that they
# hide no flag's variable.
parse() {
  local texts=" $1 " switches=" $2 dry_run " flag_ value_
  shift 2
  while [ $# -gt 0 ]; do
    flag_=${1%%=*}
    flag_=${flag_#--}
    case "$1" in
      --help | -h)
        usage
        exit 0
        ;;
      --)
        shift
        rest=("$@")
        return
        ;;
      --*=*)
        [[ "$texts" == *" $flag_ "* ]] || unknown "$1" "$texts" "$switches"
        value_=${1#*=}
        [ -n "$value_" ] || fail "--$flag_ is empty: $(meaning "$flag_")"
        if [ "$flag_" != env ]; then
          printf -v "$flag_" '%s' "$value_"
        elif [[ "$value_" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then
          env+=("$value_")
        else
          fail "--env must be --env=NAME=VALUE; got '$1'."
        fi
        ;;
      --*)
        [[ "$texts" != *" $flag_ "* ]] || fail "--$flag_ needs a value: --$flag_=VALUE."
        [[ "$switches" == *" $flag_ "* ]] || unknown "$1" "$texts" "$switches"
        printf -v "$flag_" 1
        ;;
      *) unknown "$1" "$texts" "$switches" ;;
    esac
    shift
  done
}

unknown() {
  local names
  # shellcheck disable=SC2086 # the names are to be split
  names=$(printf -- '--%s ' $2 $3)
  fail "'$1' is not a flag. Flags: ${names% }; what follows -- goes to the command."
}

# Prints the help of a flag.
meaning() { usage | sed -n "s/^ *--$1\(=[^ ]*\)\{0,1\}  *//p" | head -n 1; }

# Stops unless each of the named flags was given.
need() {
  local flag_
  for flag_ in "$@"; do
    [ -n "${!flag_}" ] || fail "--$flag_ is needed: $(meaning "$flag_")"
  done
}

# Stops unless each of the named flags, if it has a value, is a whole number, $1 or more.
need_numbers() {
  local least_=$1 flag_
  shift
  for flag_ in "$@"; do
    [[ -z "${!flag_}" || "${!flag_}" =~ ^(0|[1-9][0-9]*)$ && "${!flag_}" -ge "$least_" ]] \
      || fail "--$flag_ must be a whole number; got '${!flag_}', and at least $least_ is wanted."
  done
}

# Stops unless $1, the --name, can be that of a machine: the machines' own names begin with it.
need_name() {
  need name
  [[ "$1" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] \
    || fail "--name must be at most 40 of a-z, 0-9 and -, from a letter on; got '$1'."
}

# Prints the value of a --NAME=VALUE for launch/train.py.
train_flag() {
  local argument
  for argument in ${rest[@]+"${rest[@]}"}; do
    case "$argument" in "--$1="*) echo "${argument#*=}" ;; esac
  done
}

# Stops unless the flags of launch/train.py have a config and a workdir below $1.
need_train_flags() {
  local example="-- --config=configs/qwen32b_dapo.py --workdir=$1runs/qwen32b" workdir
  [ -n "$(train_flag config)" ] || fail "--config is needed after --, for example: $example"
  workdir=$(train_flag workdir)
  [ -n "$workdir" ] || fail "--workdir is needed after --, for example: $example"
  case "$workdir" in
    "$1"*) ;;
    *) fail "--workdir must begin with $1, the directory that all hosts see; got $workdir." ;;
  esac
}

# Prints the arguments quoted for a shell.
quote() {
  local argument line='' flag escaped="'\\''"
  for argument in "$@"; do
    flag=''
    if [[ "$argument" =~ ^--[a-zA-Z_-]+= ]]; then
      flag=${BASH_REMATCH[0]}
      argument=${argument#"$flag"}
    fi
    if [[ ! "$argument" =~ ^[a-zA-Z0-9_./:=@%+,-]*$ || -z "$flag$argument" ]]; then
      argument="'${argument//\'/$escaped}'"
    fi
    line+=" $flag$argument"
  done
  echo "${line# }"
}

# Runs a command, or prints it in a dry run.
act() {
  if [ -n "$dry_run" ]; then
    quote "$@"
  else
    "$@"
  fi
}
