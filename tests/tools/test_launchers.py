"""The launchers of pods: their commands, restarts, and the JobSet that they fill."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.support.launchers import (
    CLUSTER,
    DRY_RUNS,
    GOLDENS,
    GPUS,
    IMAGE,
    MANIFEST,
    NFS,
    NODES,
    PLACE,
    SLICE,
    TRAIN,
    call,
    calls,
    golden,
    stand_in,
    statuses,
)

SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
XPK_RUN = DRY_RUNS["xpk"][-1]
QUICK = "--most=9 --pause_seconds=0"


@pytest.mark.parametrize("name", DRY_RUNS)
def test_dry_runs_print_what_they_would_run(name):
    """Where a difference is meant: python -m tests.goldens.make_launchers."""
    assert golden(name) == (GOLDENS / f"{name}.txt").read_text()


def test_a_dry_run_runs_nothing(tmp_path):
    names = ("gcloud", "git", "xpk", "docker", "kubectl", "sbatch", "srun", "scontrol", "python")
    for name in names:
        stand_in(tmp_path, name, "exit 1")
    for line in (line for lines in DRY_RUNS.values() for line in lines):
        head, dashes, rest = line.partition(" -- ")
        assert call(f"{head} --dry_run{dashes}{rest}", path=tmp_path)[0] == 0
    assert calls(tmp_path) == []


def test_a_dry_run_of_the_training_program_is_submitted_with_its_flag(tmp_path):
    """The --dry_run before -- is the launcher's, the one after it launch/train.py's."""
    stand_in(tmp_path, "sbatch", "exit 0")
    assert call(f"launch/slurm.sh {GPUS} {TRAIN} --dry_run", path=tmp_path)[0] == 0
    (submitted,) = calls(tmp_path)
    assert submitted.endswith(f"{TRAIN} --dry_run") and submitted.count("--dry_run") == 1
    out = call(f"launch/slurm.sh {GPUS} --dry_run {TRAIN} --dry_run", path=tmp_path)[1]
    assert out.splitlines()[0].endswith(f"{TRAIN} --dry_run") and len(calls(tmp_path)) == 1


def test_the_documentation_has_the_commands_that_are_tested():
    text = re.sub(r" \\\n *", " ", (ROOT / "docs" / "pods.md").read_text())
    shown = {line.strip() for line in text.splitlines() if line.startswith("    ")}
    lines = {line for name, lines in DRY_RUNS.items() if name != "restart" for line in lines}
    assert lines <= shown, lines - shown


@pytest.mark.parametrize(
    "script", [s for s in SCRIPTS if s.name != "common.sh"], ids=lambda s: s.stem
)
def test_help_names_every_flag(script):
    status, out, err = call(f"launch/{script.name} --help")
    assert status == 0 and err == "" and f"launch/{script.name}" in out
    assert call(f"./{script.name} --help", cwd=script.parent) == (status, out, err)
    assert call(f"CDPATH=. launch/{script.name} --help") == (status, out, err)
    parsed = re.findall(r'^parse "([^"]*)" \\?\s*"([^"]*)"', script.read_text(), re.M)
    assert len(parsed) == 1
    for flag in " ".join(parsed[0]).replace("\\\n", "").split():
        assert re.search(rf"^--{flag}(=\S+)? +\w", out, re.M), flag


@pytest.mark.parametrize(
    "line, message",
    [
        ("tpu_vm.sh", "a command is needed: create, setup, start"),
        ("tpu_vm.sh create", "--project is needed: the Google Cloud project"),
        ("tpu_vm.sh stop --project=p --zone=z", "--name is needed: of the slice"),
        ("tpu_vm.sh stop --project=p --zone=z --name=A_b", "--name must be .* got 'A_b'"),
        (f"tpu_vm.sh create {PLACE}", "--accelerator_type is needed: the kind and size"),
        (f"tpu_vm.sh create {PLACE} {SLICE} --reserved", "--spot and --reserved exclude"),
        (f"tpu_vm.sh run {PLACE} {SLICE} {TRAIN}", "--nfs is needed"),
        (f"tpu_vm.sh start {PLACE}", "--config is needed after --"),
        (f"tpu_vm.sh start {PLACE} -- --config=c.py", "--workdir is needed after --"),
        (f"tpu_vm.sh start {PLACE} -- --config=c --workdir=/tmp/a", "--workdir .* got /tmp/a"),
        (f"tpu_vm.sh start {PLACE} --env=A {TRAIN}", "--env must be --env=NAME=VALUE; got"),
        (f"tpu_vm.sh stop {PLACE} --workdri=x", "'--workdri=x' is not a flag. Flags: --project"),
        (f"tpu_vm.sh stop {PLACE} stray", "'stray' is not a flag"),
        ("tpu_vm.sh stop --project", "--project needs a value"),
        ("tpu_vm.sh stop --project=", "--project is empty: the Google Cloud project"),
        (f"tpu_vm.sh run {PLACE} {SLICE} {NFS} --poll_seconds=abc {TRAIN}", "got 'abc'"),
        ("xpk.sh create --project=p --zone=z", "--cluster is needed: of the cluster"),
        (f"xpk.sh create {CLUSTER} --tpu_type=t --storage=s --storage_gb=1", "one of --spot, "),
        (f"xpk.sh start {CLUSTER} {IMAGE} {TRAIN}", "--accelerator is needed"),
        (f"xpk.sh start {CLUSTER} {IMAGE} {NODES} --topology=64 {TRAIN}", "--topology .* got '64'"),
        (
            f"xpk.sh manifest {IMAGE} --name=a {NODES} --topology=2x2x1 --chips_per_host=8 {TRAIN}",
            "--chips_per_host=8 does not divide the 4 chips of --topology=2x2x1",
        ),
        (f"xpk.sh setup {IMAGE} --storage_gb=foo", "--storage_gb must be a whole number; got"),
        (f"xpk.sh setup {IMAGE} --max_restarts=-1", "--max_restarts must be a whole number; got"),
        (f"xpk.sh setup {IMAGE} --chips_per_host=0", "--chips_per_host .* at least 1 is wanted"),
        (f"slurm.sh --nodes=4 {TRAIN}", "--gpus_per_node is needed: GPUs of a node"),
        (f"slurm.sh {GPUS} --nodes=none {TRAIN}", "--nodes must be a whole number; got 'none'"),
        (f"slurm.sh {GPUS} --processes_per_node=3 {TRAIN}", "must be 1 or --gpus_per_node"),
        ("restart.sh", "the command is missing"),
        ("restart.sh --most=0 -- true", "--most must be a whole number; got '0', and at least 1"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path, line, message):
    for name in ("gcloud", "xpk", "docker", "kubectl", "sbatch", "srun"):
        stand_in(tmp_path, name, "exit 1")
    status, out, err = call(f"launch/{line}", path=tmp_path)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and re.search(message, err), err
    assert calls(tmp_path) == []


# What starts a run again.


@pytest.mark.parametrize(
    "given, status, starts",
    [
        ((0,), 0, 1),
        ((75, 134, 137, 139, 143, 0), 0, 6),
        ((75, *[76] * 20, 75, 0), 0, 23),
        ((130,), 130, 1),
        ((127,), 127, 1),
        ((75, 2), 2, 2),
        ((75, 1), 1, 2),
    ],
)
def test_the_status_says_whether_it_starts_again(tmp_path, given, status, starts):
    program = statuses(tmp_path, *given)
    assert call(f"launch/restart.sh {QUICK} -- {program} 'a b' c")[0] == status
    assert calls(tmp_path) == ["train a b c"] * starts


def test_starts_without_a_new_step_come_to_an_end(tmp_path):
    """However long each lasts."""
    program = statuses(tmp_path, *[75] * 20)
    status, _, err = call(f"launch/restart.sh --pause_seconds=0 -- {program}")
    assert status == 1, "a failure, or what runs this would start it again"
    assert len(calls(tmp_path)) == 5
    assert re.search(r"status 75 after \d+ s: gives up after 5 starts in a row without a new", err)


def test_waiting_for_other_processes_comes_to_an_end_too(tmp_path):
    program = statuses(tmp_path, *[76] * 5, 75, *[76] * 20)
    line = f"launch/restart.sh --most_waits=7 --pause_seconds=0 -- {program}"
    status, _, err = call(line)
    assert status == 1 and len(calls(tmp_path)) == 5 + 1 + 7
    assert "gives up, the other processes were not there for 7 starts" in err


def test_a_step_counts_once(tmp_path):
    """A run that completes the same step in each start makes no progress."""
    steps = 'set -- "" 0 1 1 2 2 2\nshift "$(wc -l < "$(dirname "$0")/log")"\n'
    program = stand_in(tmp_path, "train", steps + 'echo "$1" > "$DAPO_PROGRESS"\nexit 134')
    line = f"launch/restart.sh --most=2 --pause_seconds=0 -- {program}"
    assert call(line, TMPDIR=str(tmp_path))[0] == 1
    assert len(calls(tmp_path)) == 6, "0, 1, again 1, 2, and two more that repeat 2"
    assert not list(tmp_path.glob("dapo_progress*"))


SLEEPER = 'trap \'exit {}\' {}\ntouch "$(dirname "$0")/ready"\nwhile :; do sleep 0.1; done'


def started(line, tmp_path, **variables):
    """A command in a process of its own, once its stand-in has come to `ready`."""
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | variables
    # What runs in the background of a shell ignores SIGINT, what nohup runs SIGHUP, and so would
    # all that they start.
    command = ["env", "--default-signal=INT,HUP", "bash", *line.split()]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    "sent, handled, status",
    [("TERM", 143, 143), ("TERM", 0, 0), ("INT", 130, 130), ("HUP", 129, 129)],
)
def test_signals_go_on_to_the_command_and_nothing_starts_again(tmp_path, sent, handled, status):
    program = stand_in(tmp_path, "train", SLEEPER.format(handled, sent))
    process = started(f"launch/restart.sh {QUICK} -- {program}", tmp_path)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    _, err = process.communicate(timeout=30)
    assert process.returncode == status and len(calls(tmp_path)) == 1
    assert b"starts again" not in err


def test_a_signal_between_two_starts_ends_it(tmp_path):
    program = stand_in(tmp_path, "train", 'touch "$(dirname "$0")/ready"\nexit 75')
    process = started(f"launch/restart.sh --pause_seconds=60 -- {program}", tmp_path)
    assert process.stderr is not None
    assert b"starts again in 60 s" in process.stderr.readline()
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143 and len(calls(tmp_path)) == 1


# The slice that is asked for again, and the job that goes into the queue again.


def cloud(tmp_path, *looks):
    """gcloud, whose looks at the slice and, after a slash, at the run on two workers are these.
    With nothing after the slash a worker does not answer."""
    (tmp_path / "looks").write_text("".join(f"{look}\n" for look in looks))
    looks = f'"{tmp_path}/looks"'
    script = f"""
    look=$(head -n 1 {looks})
    case "$*" in
      *list*) echo "${{look%%/*}}"; [[ "$look" == */* ]] || sed -i.old 1d {looks} ;;
      *"echo status"*)
        printf 'status %s\\n' "${{look#*/}}" "${{look#*/}}"
        sed -i.old 1d {looks}
        [[ "$look" != */ ]] ;;
    esac"""
    stand_in(tmp_path, "gcloud", script)
    stand_in(tmp_path, "git", 'case "$1" in rev-parse) echo c0ffee ;; esac')


def done_by(tmp_path):
    """What was done to the slice, without the looks at it."""
    words = {
        "resources create": "create",
        "git archive": "setup",
        "systemd-run": "start",
        "systemctl stop": "stop",
        "resources delete": "delete",
    }
    lines = [next((w for k, w in words.items() if k in line), "") for line in calls(tmp_path)]
    return [line for line in lines if line]


BEGUN = ["stop", "setup", "start"]
NONE, FRESH, RUNS = "", "ACTIVE/inactive dead 0", "ACTIVE/active running 0"


@pytest.mark.parametrize(
    "looks, status, done",
    [
        (
            [NONE, "WAITING_FOR_RESOURCES", FRESH, RUNS, "ACTIVE/active exited 0"],
            0,
            ["create", *BEGUN, "stop", "delete"],
        ),
        (
            [NONE, FRESH, RUNS, "SUSPENDED", NONE, FRESH, RUNS, "ACTIVE/active exited 0"],
            0,
            ["create", *BEGUN, "delete", "create", *BEGUN, "stop", "delete"],
        ),
        ([RUNS, "ACTIVE/failed failed 2"], 2, ["stop"]),
        ([FRESH, RUNS, "ACTIVE/failed failed 1"], 1, [*BEGUN, "stop"]),
        # Deleted by the user, in another terminal: not bought again.
        ([RUNS, "DELETING", NONE], 1, []),
        # A request that cannot be met.
        ([NONE, *["FAILED", NONE] * 4, "FAILED"], 1, ["create", *["delete", "create"] * 4, "stop"]),
        # Not in a row.
        (
            [*["FAILED"] * 4, RUNS, *["FAILED"] * 4, "ACTIVE/active exited 0"],
            0,
            [*["delete"] * 8, "stop", "delete"],
        ),
    ],
)
def test_a_slice_is_asked_for_again_and_kept_after_a_failure(tmp_path, looks, status, done):
    cloud(tmp_path, *looks)
    flags = f"{PLACE} {SLICE} {NFS} --poll_seconds=0"
    assert call(f"launch/tpu_vm.sh run {flags} {TRAIN}", path=tmp_path)[0] == status
    assert done_by(tmp_path) == done


@pytest.mark.parametrize(
    "minutes, done", [(0, ["delete", "create", *BEGUN]), (30, BEGUN)], ids=["soon", "not yet"]
)
def test_a_slice_with_a_lost_worker_is_deleted_and_requested_again(tmp_path, minutes, done):
    deleted = [NONE] if minutes == 0 else []
    cloud(tmp_path, RUNS, "ACTIVE/", *deleted, FRESH, RUNS, "ACTIVE/active exited 0")
    flags = f"{PLACE} {SLICE} {NFS} --poll_seconds=0 --lost_minutes={minutes}"
    assert call(f"launch/tpu_vm.sh run {flags} {TRAIN}", path=tmp_path)[0] == 0
    assert done_by(tmp_path) == [*done, "stop", "delete"]


@pytest.mark.parametrize("failed, status", [(1, 2), (2, 0)], ids=["first", "later"])
def test_a_run_ends_where_its_first_look_fails_and_goes_on_after_a_later_one(
    tmp_path, failed, status
):
    """A wrong zone is no outage."""
    cloud(tmp_path, RUNS, "ACTIVE/active exited 0")
    gcloud, looks = tmp_path / "gcloud", tmp_path / "n"
    fails = f'echo >> {looks}; [ "$(wc -l < {looks})" -ne {failed} ] || exit 1'
    gcloud.write_text(f'{gcloud.read_text()}\ncase "$*" in *list*) {fails} ;; esac\n')
    flags = f"{PLACE} {SLICE} {NFS} --poll_seconds=0"
    found, _, err = call(f"launch/tpu_vm.sh run {flags} {TRAIN}", path=tmp_path)
    assert found == status
    assert ("--zone=us-east5-a cannot be listed" in err) == (failed == 1)
    assert ("the state of the slice is not available" in err) == (failed == 2)


@pytest.mark.parametrize("changed", [True, False])
def test_a_set_up_warns_of_changes_that_are_not_committed(tmp_path, changed):
    cloud(tmp_path, FRESH)
    stand_in(tmp_path, "git", f'case "$1" in status) echo "{" M a.py" * changed}" ;; esac')
    flags = f"{PLACE} {SLICE} {NFS}"
    _, _, errors = call(f"launch/tpu_vm.sh setup {flags}", path=tmp_path)
    assert ("changes that are not committed do not run" in errors) == changed


def test_every_set_up_of_a_run_has_the_commit_of_its_start(tmp_path):
    """Though HEAD has moved; and no two launches write the same file."""
    cloud(tmp_path, FRESH, "SUSPENDED", NONE, FRESH, "ACTIVE/failed failed 3 a-host")
    heads = 'case "$1" in rev-parse) echo c$RANDOM ;; esac'
    stand_in(tmp_path, "git", heads)
    flags = f"{PLACE} {SLICE} {NFS} --poll_seconds=0"
    for status in (3, 1):
        assert call(f"launch/tpu_vm.sh run {flags} {TRAIN}", path=tmp_path)[0] == status
        cloud(tmp_path, *[FRESH] * 9)
        stand_in(tmp_path, "git", f"{heads}\n[ $1 != archive ]")
    archives = [line.split() for line in calls(tmp_path) if line.startswith("git archive")]
    assert len(archives) == 2 + 5
    files, commits = ({words[i] for words in archives[:2]} for i in (-2, -1))
    assert len(commits) == 1 and re.fullmatch(r"c\d+", commits.pop())
    assert len(files) == 1 and files.isdisjoint(words[-2] for words in archives[2:])
    assert not Path(files.pop().removeprefix("--output=")).parent.exists()
    log = "tail -n 30 /shared/logs/qwen32b/a-host.log"
    assert [line for line in calls(tmp_path) if log in line], "the end of the failed worker's log"


@pytest.mark.parametrize("flag, deleted", [("", []), ("--delete_on_failure", ["delete"])])
def test_a_slice_that_cannot_be_set_up_is_deleted_if_asked(tmp_path, flag, deleted):
    cloud(tmp_path, *[FRESH] * 9)
    stand_in(tmp_path, "git", "[ $1 != archive ]")
    flags = f"{PLACE} {SLICE} {NFS} --poll_seconds=0 {flag}"
    status, _, err = call(f"launch/tpu_vm.sh run {flags} {TRAIN}", path=tmp_path)
    assert status == 1 and "begin failed, 5 times in a row" in err
    assert ("the slice is kept, and costs until: launch/tpu_vm.sh delete" in err) != bool(deleted)
    assert done_by(tmp_path) == [*["stop", "setup"] * 5, "stop", *deleted]


@pytest.mark.parametrize(
    "sent, status, again",
    [
        *[("USR1", status, True) for status in (143, 75, 76, 134, 137, 139)],
        ("USR1", 1, False),
        ("USR1", 0, False),
        ("TERM", 143, False),
    ],
)
def test_a_job_asks_for_more_time(tmp_path, sent, status, again):
    """Where its processes were stopped or would have started again; srun itself kills its tasks
    where it gets SIGTERM."""
    stand_in(tmp_path, "task", f"echo $$ > {tmp_path}/pid\n{SLEEPER.format(status, 'TERM')}")
    stand_in(tmp_path, "srun", "task &\ntrap 'kill -KILL $!; exit 137' TERM\nwait $!")
    term = f'kill -TERM "$(cat {tmp_path}/pid)"'
    stand_in(tmp_path, "scancel", term)
    stand_in(tmp_path, "scontrol", "")
    process = started(f"launch/slurm.sh {GPUS} {TRAIN}", tmp_path, SLURM_JOB_ID="7")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    if sent == "TERM":  # Slurm signals the tasks, too
        subprocess.run(term, shell=True, check=True)
    process.communicate(timeout=30)
    assert process.returncode == status
    asked = ["scancel --signal=TERM 7"] * (sent == "USR1") + ["scontrol requeue 7"] * again
    assert [call for call in calls(tmp_path) if call.startswith("sc")] == asked


@pytest.mark.parametrize("failed", ["docker build", "xpk cluster create", "kubectl apply"])
def test_a_step_that_fails_ends_the_launch_on_a_cluster(tmp_path, failed):
    """And says that the cluster costs, once there may be one."""
    for name in ("gcloud", "xpk", "docker", "kubectl"):
        ends = f'case "{name} $*" in "{failed}"*) exit 3 ;; "docker build"*) cat >/dev/null ;; esac'
        stand_in(tmp_path, name, ends)
    status, _, err = call(XPK_RUN, path=tmp_path)
    assert status == 3
    is_there = failed != "docker build"
    assert ("costs until: launch/xpk.sh delete --project=" in err) == is_there
    assert calls(tmp_path)[-1].startswith(failed)
    assert any(line.startswith("xpk cluster create") for line in calls(tmp_path)) == is_there


@pytest.mark.parametrize("ended", ["Failed", ""])
def test_a_jobset_that_has_ended_is_replaced(tmp_path, ended):
    """kubectl apply would print "unchanged" and start nothing."""
    stand_in(tmp_path, "gcloud", "")
    answers = f'case "$1" in apply) cat ;; get) echo -n {ended} ;; esac'
    stand_in(tmp_path, "kubectl", answers)
    line = f"launch/xpk.sh start {CLUSTER} {NODES} {IMAGE} {TRAIN}"
    status, _, err = call(line, path=tmp_path)
    done = [line.split()[1] for line in calls(tmp_path) if line.startswith("kubectl")]
    assert status == 0 and done == ["get", *["delete"] * bool(ended), "apply"]
    assert ("has ended (Failed), and is replaced" in err) == bool(ended)


@pytest.mark.parametrize(
    "get, status, logs",
    [
        ('[[ "$*" == *--ignore-not-found*terminalState* ]] || echo -n Completed', 0, False),
        ('[[ "$*" == *--ignore-not-found*terminalState* ]] || echo -n Failed', 1, True),
        # Deleted from elsewhere: with --ignore-not-found nothing is no failure.
        ('[[ "$*" == *--ignore-not-found* ]]', 1, True),
    ],
    ids=["completed", "failed", "deleted"],
)
def test_a_cluster_is_deleted_though_its_run_is_not(tmp_path, get, status, logs):
    for name in ("gcloud", "xpk"):
        stand_in(tmp_path, name, "")
    stand_in(tmp_path, "docker", '[ "$1" != build ] || cat >/dev/null')
    ends = f'case "$1" in apply) cat ;; delete) exit 3 ;; get) {get} ;; esac'
    stand_in(tmp_path, "kubectl", ends)
    assert call(XPK_RUN, path=tmp_path)[0] == status
    done = calls(tmp_path)
    assert done[-1].startswith("xpk cluster delete") and done[-1].endswith(" --quiet")
    words = [" ".join(line.split()[:2]) for line in done]
    assert ("kubectl logs" in words) == logs
    assert not logs or words.index("kubectl logs") < words.index("kubectl delete")


def test_the_storage_of_an_earlier_cluster_is_used_again(tmp_path):
    stand_in(tmp_path, "xpk", '[[ "$*" != "storage create"* ]]')  # there is one of this name
    line = DRY_RUNS["xpk"][0]
    assert call(line, path=tmp_path)[0] != 0
    assert call(f"{line} --attach", path=tmp_path)[0] == 0
    assert "--size" not in calls(tmp_path)[-1]
    assert calls(tmp_path)[-1].startswith("xpk storage attach shared --cluster=dapo")


def test_the_image_is_made_of_the_commit(tmp_path):
    stand_in(tmp_path, "docker", f'[ "$1" != build ] || tar -tf - > "{tmp_path}/files"')
    assert call(f"launch/xpk.sh setup {IMAGE} --extra=wandb", path=tmp_path)[0] == 0
    assert "--build-arg=EXTRA=wandb" in calls(tmp_path)[0]
    files = (tmp_path / "files").read_text().split()
    assert "launch/train.py" in files and "dapo_jax/COMMIT" in files
    assert not [file for file in files if file.startswith((".git/", ".venv/"))]


# The files themselves.


def program(name):
    """A program on the path or in the folder of this Python."""
    return shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)


@pytest.mark.skipif(program("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    command = [program("shellcheck"), "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_bash_that_macos_lacks():
    """Its bash is 3.2: no associative arrays, no @Q, no ${x^^}, no mapfile, no wait -n."""
    for script in SCRIPTS:
        found = re.search(r"declare -A|@Q\}|\^\^|mapfile|readarray|wait -n|&>>", script.read_text())
        assert not found, (script.name, found)


@pytest.fixture(scope="module")
def manifest():
    status, out, err = call(MANIFEST)
    assert status == 0, err
    assert out == (GOLDENS / "jobset.yaml").read_text()
    return yaml.safe_load(out)


def test_the_manifest_has_the_fields_of_a_jobset(manifest):
    """The fields in use, as the APIs of JobSet v1alpha2 and Kubernetes define them."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads((ROOT / "tests" / "goldens" / "jobset_schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)
    misspelt = json.loads(json.dumps(manifest).replace('"containers"', '"container"'))
    with pytest.raises(jsonschema.ValidationError, match="containers?'"):
        jsonschema.validate(misspelt, schema)


def test_the_manifest_starts_again_what_restart_does(manifest):
    """A status that ends launch/restart.sh ends the JobSet; any other recreates its pods."""
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    disrupted, failed = pods["podFailurePolicy"]["rules"]
    assert pods["parallelism"] == pods["completions"] == 64 // 4
    assert pods["template"]["spec"]["restartPolicy"] == "Never", "as podFailurePolicy requires"
    assert disrupted["action"] == "Count" and failed["action"] == "FailJob"
    assert failed["onExitCodes"]["containerName"] == container["name"]
    codes = failed["onExitCodes"]["values"]
    assert failed["onExitCodes"]["operator"] == "NotIn"
    assert codes == sorted(codes), "as Kubernetes requires"
    again = re.search(r"^    (75.*)\) ;;", (ROOT / "launch" / "restart.sh").read_text(), re.M)
    # 128 and 255 are the kubelet's: of a container that did not start, or whose end it did not see.
    assert again and {*map(int, again[1].split(" | ")), 128, 255} == set(codes)
    assert container["imagePullPolicy"] == "Always"
    assert container["envFrom"] == [{"secretRef": {"name": "qwen32b", "optional": True}}]
    assert manifest["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == [
        "PodFailurePolicy"
    ]
    assert container["args"] == TRAIN.split()[1:]
    assert {"name": "LIBTPU_INIT_ARGS", "value": "--x=1"} in container["env"]


VALUE = r"""a "b" 'c' \d & $e ${f} $(g)""" + "\n\th"
QUOTED = "'" + VALUE.replace("'", r"'\''") + "'"
READ = VALUE.replace("$", "$$")  # Kubernetes and systemd read $$ as $


def test_values_stay_as_they_are_in_the_manifest():
    line = MANIFEST.replace("--env=LIBTPU_INIT_ARGS=--x=1", f"--env=X={QUOTED}")
    _, out, _ = call(f"{line} --config.x={QUOTED}")
    spec = yaml.safe_load(out)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert spec["containers"][0]["env"][-1] == {"name": "X", "value": READ}
    assert spec["containers"][0]["args"][-1] == f"--config.x={READ}"


def test_values_stay_as_they_are_through_ssh(tmp_path):
    """Two shells read the command of start: the one here and the one of the worker."""
    _, printed, _ = call(f"launch/tpu_vm.sh start {PLACE} --dry_run {TRAIN} --config.x={QUOTED}")
    stand_in(tmp_path, "gcloud", 'for a in "$@"; do :; done; bash -c "${a#--command=}"')
    stand_in(tmp_path, "sudo", 'printf "%s\\n" "$@"')
    stand_in(tmp_path, "mkdir", "")
    status, out, err = call(printed, path=tmp_path)
    assert status == 0, err
    assert out.endswith(f"\n--config.x={READ}\n")


def test_what_the_image_holds():
    """The image gets what it needs to train, and no environment of this machine."""
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".uv", "runs"} <= set(ignored)
    assert not {"configs", "dapo_jax", "launch", "pyproject.toml"} & set(ignored)
    assert 'ENTRYPOINT ["launch/restart.sh", "--"' in (ROOT / "Dockerfile").read_text()
