"""The batch script as data, run in bash with commands of ours, and lines that squeue prints; without any Slurm."""

import json
import shlex
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import slurm_queue
from kftrain.launch.base import build_launcher
from kftrain.launch.scheduler import SchedulerAwayError
from kftrain.launch.spec import JobSpec, Role, make_job
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths

GOLDEN = Path(__file__).parents[2] / "golden" / "slurm.sh"

SETTINGS = [
    "launch.backend=slurm",
    "launch.slurm.python=/shared/venv/bin/python",
    "launch.slurm.partition=gpu",
    "launch.slurm.gpus_per_node=8",
    "launch.slurm.time_limit_minutes=240",
]

COMMANDS = {
    "srun": """printf '%s\\0' "$@" > "$SEEN"; env -0 > "$SEEN.environment"; exit ${CODE:-0}""",
    "squeue": "echo RUNNING",
    "scontrol": 'echo "$*" >> "$SEEN.asked"',
}
"""Commands of ours: srun writes what it was given, as arguments and as environment, and ends with the code CODE."""


def make_spec(arguments=("worker", "--task", "train"), environment=None, run_uri="/shared/kftrain/runs/r"):
    return JobSpec("train", run_uri, "d" * 64, (Role("worker", 2, 8, tuple(arguments)),), environment or {})


def build(spec, *overrides):
    resolved = config.parse("", ["run.storage_root=/shared/kftrain", *SETTINGS, *overrides])
    return build_launcher(resolved).build(spec)


def run_script(script, folder, programs=COMMANDS, **environment):
    """Run a batch script with commands of ours; return srun's arguments and environment, and the completed process."""
    commands, seen = folder / "commands", folder / "seen"
    if not commands.exists():
        commands.mkdir()
        for name, text in programs.items():
            (commands / name).write_text(f"#!/bin/bash\n{text}\n")
            (commands / name).chmod(0o755)
    variables = {"SEEN": str(seen), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", **environment}
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=folder,
        env={**variables, "PATH": f"{commands}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    arguments, lines = (path.read_bytes().decode().split("\0")[:-1] for path in (seen, folder / "seen.environment"))
    return arguments, dict(line.split("=", 1) for line in lines), done


def test_the_request_is_the_one_that_was_reviewed():
    spec = make_spec(environment={"NCCL_DEBUG": "INFO", "NOTE": 'it\'s "here"; $(reboot)'})
    text = build(spec).text
    assert text == GOLDEN.read_text()


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
HOSTILE = st.one_of(
    TEXT, st.sampled_from(["$(touch PWNED)", "`touch PWNED`", "';touch PWNED;'", "\nEND_OF_JOB\n", "-x", "a\\"])
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=HOSTILE, argument=HOSTILE, name=HOSTILE)
def test_no_text_becomes_shell(tmp_path, value, argument, name):
    spec = make_spec(("worker", argument), {"VALUE": value, "OTHER": name}, f"/shared/kftrain/runs/r{name}")
    request = build(spec)
    arguments, environment, done = run_script(request.content["script"], tmp_path)
    assert (environment["VALUE"], environment["OTHER"]) == (value, name)
    assert arguments[-2:] == ["worker", argument] and done.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"commands", "seen", "seen.environment", "train-7.code"}
    assert shlex.split(request.text.partition(" <<'END_")[0]) == request.content["command"]
    comment = next(part for part in request.content["command"] if part.startswith("--comment="))
    assert comment.isascii() and comment.isprintable()
    assert (
        "\n".join(request.content["script"].splitlines()).count("#SBATCH") == 0 or "#SBATCH" in value + argument + name
    )


def test_every_setting_is_an_option_of_sbatch():
    values = {"account": "a b", "qos": "long", "constraint": "x&y", "reservation": "r", "gres": "nvme:1"}
    pairs = [f"launch.slurm.{key}={value}" for key, value in values.items()]
    command = build(make_spec(), *pairs, "launch.slurm.cpus_per_node=4", "launch.slurm.exclusive=true").content[
        "command"
    ]
    assert {f"--{key}={value}" for key, value in values.items()} <= set(command)
    assert {"--cpus-per-task=4", "--exclusive"} <= set(command)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE.filter(str.isprintable).filter(lambda text: text.strip(" -") == text != ""))
def test_modules_are_loaded_before_the_workers_start(tmp_path, text):
    commands = {**COMMANDS, "module": """printf '%s\\0' "$@" > "$SEEN.modules"; exit ${MODULES:-0}"""}
    script = build(make_spec(), f"launch.slurm.modules={json.dumps(['cuda/12.4', text], ensure_ascii=False)}").content[
        "script"
    ]
    run_script(script, tmp_path, commands)
    assert (tmp_path / "seen.modules").read_text().split("\0") == ["load", "cuda/12.4", text, ""]
    (tmp_path / "seen").write_text("")
    *_, done = run_script(script, tmp_path, commands, MODULES="1")
    assert done.returncode == 1 and not (tmp_path / "seen").read_text(), "without its modules no worker may start"


IMAGE = "registry.example#team/trainer:1 $(touch PWNED)"
WORKER = ["python", "-m", "kftrain", "worker", "--task", "train"]
ROOT = "/shared/kftrain:/shared/kftrain"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("pyxis", [f"--container-image={IMAGE}", f"--container-mounts={ROOT},/data:/data:ro"], WORKER),
        (
            "apptainer",
            [],
            ["apptainer", "exec", "--nv", "--bind", ROOT, "--bind", "/data:/data:ro", IMAGE, *WORKER],
        ),
    ],
)
def test_workers_run_in_a_container_that_has_the_storage_root(tmp_path, kind, options, words):
    pairs = {"container": kind, "container_image": IMAGE, "container_mounts": ["/data:/data:ro"], "python": ""}
    request = build(make_spec(), *(f"launch.slurm.{key}={json.dumps(value)}" for key, value in pairs.items()))
    arguments, *_ = run_script(request.content["script"], tmp_path)
    shell = arguments.index("bash")
    assert arguments[:shell] == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", *options]
    assert arguments[shell + 3 :] == ["worker", *words]


def test_a_cluster_without_pyxis_is_refused(tmp_path, monkeypatch):
    for name in slurm_queue.COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    pairs = ["launch.backend=slurm", "launch.slurm.container=pyxis", "launch.slurm.container_image=x"]
    launcher = build_launcher(config.parse("", [*pairs, f"run.storage_root={tmp_path}"]))
    for words, expectation in (
        ("", pytest.raises(LaunchError, match="no pyxis")),
        ("--container-image", nullcontext()),
    ):
        (tmp_path / "srun").write_text(f"#!/bin/sh\necho ' {words}=IMAGE'\n")
        for name in (*slurm_queue.COMMANDS, "srun"):
            (tmp_path / name).chmod(0o755)
        with expectation:
            launcher.check()


def test_half_a_container_is_refused():
    for pair in ("container=pyxis", "container_image=x.sif", "container_mounts=[/data:/data]"):
        with pytest.raises(ConfigError, match="set together"):
            build(make_spec(), f"launch.slurm.{pair}")


@pytest.mark.parametrize("code", [0, 16, 143])
def test_the_script_ends_with_the_workers_code_and_leaves_it(tmp_path, code):
    *_, done = run_script(build(make_spec()).content["script"], tmp_path, CODE=str(code))
    assert done.returncode == code and (tmp_path / "train-7.code").read_text() == f"{code}\n"
    assert (tmp_path / "train-7.code").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "seen.asked").exists()


SERVED = {
    **COMMANDS,
    "srun": """case $1 in
--het-group=*)
  printf '%s\\0' "$@" > "$SEEN.server"
  [ -z "$SERVER" ] || exit "$SERVER"
  echo serves; echo $$ > "$SEEN.$2"; exec sleep 20 ;;
esac
"""
    + COMMANDS["srun"].replace("exit", "sleep 1; exit"),
    "scancel": """printf '%s\\0' "$@" > "$SEEN.told"; kill $(cat "$SEEN".--relative*)""",
}
"""Servers serve until they are told to stop, or fail at once with SERVER; workers end after 1 s with CODE."""


def make_served(*arguments):
    spec = make_spec()
    return replace(spec, roles=(*spec.roles, Role("server", 2, 1, ("server", *arguments))))


def test_other_roles_are_parts_of_a_heterogeneous_job():
    command = build(make_served()).content["command"]
    (part,) = [index for index, word in enumerate(command) if word == ":"]
    assert {"--nodes=2", "--requeue", "--partition=gpu", "--comment=server"} <= set(command[part:])
    assert [word for word in command[part:] if word.startswith(("--signal", "--output", "--job-name"))] == []
    assert slurm_queue.parse_job("9|RUNNING|None|bob|2|1795762600|server") is None, "it is no job of its own"


@pytest.mark.parametrize(("server", "worker", "code"), [("", 16, 16), ("11", 143, 11), ("0", 0, 0)])
def test_servers_end_with_the_workers_and_end_them_where_they_fail(tmp_path, server, worker, code):
    value = "a b $(touch PWNED) '"
    script = build(make_served(value)).content["script"]
    variables = {"SERVER": server, "CODE": str(worker), "SLURM_JOB_ID_HET_GROUP_1": "8"}
    *_, done = run_script(script, tmp_path, SERVED, **variables)
    assert done.returncode == code and (tmp_path / "train-7.code").read_text() == f"{code}\n", done.stderr
    words = (tmp_path / "seen.server").read_text().split("\0")
    assert words[0] == "--het-group=1" and words[-3:-1] == ["server", value]
    assert not (tmp_path / "PWNED").exists()
    if not server:
        assert "[server 1] serves" in done.stdout.splitlines()
        assert (tmp_path / "seen.told").read_text().split("\0") == ["--quiet", "--signal=INT", "8", ""]


def test_what_cannot_be_run_is_refused(monkeypatch):
    with pytest.raises(LaunchError, match=r"run.storage_root: .* file system that all nodes share"):
        build(make_spec(run_uri="s3://bucket/runs/r"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"this machine has no sbatch, squeue, scontrol, scancel.*login node"):
        build_launcher(config.parse("launch: {backend: slurm}")).check()
    with pytest.raises(ConfigError, match="cannot be printed"):
        config.parse("", ['launch.slurm.partition="a\\nb"'])
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        config.parse("launch: {environment: {SLURM_JOB_ID: '7'}}")


def test_gpus_of_a_node_say_how_many_processes_it_has():
    resolved = config.parse("", [*SETTINGS, "run.storage_root=/shared", "launch.nodes=4"])
    workers = make_job(TRAINING, RunPaths.of("/shared", "r"), resolved).workers
    assert (workers.replicas, workers.processes_per_node) == (4, 8)


SQUEUE = """\
3|PENDING|Resources|alice|2|1795762800|{"kftrain": 1, "run": "/shared/runs/a|b", "task": "train", "digest": "d"}
2|RUNNING|None|bob|4|1795762700|{"kftrain": 1, "run": "/shared/runs/c", "task": "evaluate", "digest": "e"}
1|PENDING|JobHeldUser|bob|1|1795762600|(null)
4|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": ["x"], "digest": "d"}
5|RUNNING|None|eve|1|1795762600|{"kftrain": 2, "run": "/x", "task": "train", "digest": "d"}
6|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "/x\\u001b[2J", "task": "train", "digest": "d"}
7|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "s3://eve/x", "task": "train", "digest": "d"}
8|RUNNING|None|eve|1|1795762600|{"kftrain": 1, "run": "/x", "task": "mine", "digest": "d"}
9|PENDING|job requeued in held state|bob|1|1795762600|{"kftrain": 1, "run": "/x", "task": "train", "digest": "d"}
"""
"""Lines as squeue prints them, some of them of somebody who writes comments like ours."""


def test_jobs_of_others_are_not_taken_for_ours():
    first, second, suspended = (job for line in SQUEUE.splitlines() if (job := slurm_queue.parse_job(line)))
    assert (first.job_id, first.run_uri, first.reason, first.num_nodes) == ("3", "/shared/runs/a|b", "Resources", 2)
    assert (second.state, second.reason, second.user, second.submitted_at) == ("RUNNING", "", "bob", 1795762700.0)
    assert not first.is_held and not first.has_ended and suspended.is_held


OUTPUTS = Path(__file__).parent / "slurm_outputs"
"""What commands of real clusters printed, by version, for the same jobs."""

each_version = pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])

RUNS = {
    1: "alice r train COMPLETED ended",
    2: "alice r train FAILED ended",
    3: "alice lost train NODE_FAIL ended",
    4: "alice preempted train PREEMPTED ended",
    5: "bob urgent train CANCELLED ended",
    6: "alice cancelled train CANCELLED ended",
    7: "alice cancelled2 train CANCELLED ended",
    8: "alice timeout train TIMEOUT ended",
    9: "alice deadline train DEADLINE ended",
    10: "bob a|b train RUNNING",
    11: "bob het train RUNNING",
    13: "bob het_held train PENDING JobHeldUser held",
    15: "alice paused train SUSPENDED",
    16: "alice held train PENDING JobHeldUser held",
    17: "alice held evaluate PENDING JobHeldUser held",
    18: "alice held_admin train PENDING JobHeldAdmin held",
    19: "alice dependency train PENDING Dependency",
    20: "alice never train PENDING DependencyNeverSatisfied",
    21: "alice closed train PENDING PartitionDown",
    22: "alice qos1 train RUNNING",
    23: "alice qos2 train PENDING QOSMaxJobsPerUserLimit",
    24: "alice limit train PENDING PartitionTimeLimit",
    25: "alice begin train PENDING BeginTime",
    28: "alice requeuehold train PENDING job requeued in held state held",
    29: "alice requeued train PENDING BeginTime",
    30: "alice exclusive train PENDING Resources",
    31: "alice behind train PENDING Priority",
}
"""Jobs of ours by number: user, run, task, state, reason, and what follows from them.

11 and 13 are heterogeneous, with the parts 12 and 14; 26 and 27, an array, are not ours.
"""


def describe(job):
    words = [job.user, RunPaths(job.run_uri).run_id, job.task, job.state, job.reason]
    return " ".join(filter(None, [*words, "held" * job.is_held, "ended" * job.has_ended]))


@each_version
def test_squeue_of_each_version_is_read_alike(put_programs, version):
    put_programs(ssh=SSH, squeue=f"cat '{OUTPUTS}/{version}/squeue.txt'")
    jobs = slurm_queue.list_jobs(host="me@login1")
    assert {int(job.job_id): describe(job) for job in jobs} == RUNS
    assert [int(job.job_id) for job in jobs if job.num_nodes == 2] == [10, 30, 31]
    times = [job.submitted_at for job in jobs]
    assert all(1795952000 < time < 1795953000 for time in times), "they are no seconds since the epoch"


def test_a_job_whose_launch_failed_is_held():
    line = SQUEUE.splitlines()[0].replace("Resources", "launch failed requeued held")  # as all versions say it
    assert slurm_queue.parse_job(line).is_held


STATES = {
    "1": "COMPLETED",
    "2": "FAILED",
    "3": "NODE_FAIL",
    "4": "PREEMPTED",
    "6": "CANCELLED",
    "8": "TIMEOUT",
    "11": "RUNNING",
    "15": "SUSPENDED",
    "23": "PENDING",
    "999": "",
}


@each_version
@pytest.mark.parametrize("job", STATES)
def test_sacct_of_each_version_says_how_a_job_ended(put_programs, version, job):
    put_programs(ssh=SSH, sacct=f"cat '{OUTPUTS}/{version}/sacct.txt'")
    assert slurm_queue.read_past_state(job, "me@login1") == STATES[job]


@pytest.fixture
def replay(put_programs, tmp_path):
    """Yields the words of each command that was recorded below a title; a program then prints and ends as it did."""

    def replay(version, title):
        parts = (OUTPUTS / version / "commands.txt").read_text().strip().split("\n\n")
        found = [lines[1:] for part in parts if (lines := part.splitlines())[0] == f"# {title}"]
        assert found, title
        for command, *output, end in found:
            code, words = int(end.removeprefix("exit ")), shlex.split(command.removeprefix("$ "))
            (tmp_path / "output").write_text("\n".join(output))
            put_programs(ssh=SSH, **{words[0]: f"cat '{tmp_path}/output' >&{2 if code else 1}; exit {code}"})
            yield words

    return replay


@each_version
@pytest.mark.parametrize("title", ["slurmctld is away", "slurmctld does not answer"])
def test_what_each_version_says_of_an_absence_is_none_for_ever(replay, version, title):
    for command in replay(version, title):
        with pytest.raises(SchedulerAwayError) as caught:
            slurm_queue.ask_slurm(command, host="me@login1")
        if command[1] in ("hold", "release"):  # they do not say why, and a job is told again
            assert "slurmctld does not answer" in caught.value.line
            tell(command)


@each_version
def test_the_number_of_a_submitted_job_is_read(replay, version):
    launcher = build_launcher(config.parse("", [*SETTINGS, "run.storage_root=/shared", "launch.slurm.host=me@login1"]))
    for title, number in (("submitted", "32"), ("submitted to a named cluster", "33")):
        assert [launcher._submit(make_spec(), []) for _ in replay(version, title)] == [number]


@each_version
def test_what_each_version_refuses_is_said_in_its_words(replay, version):
    reasons = ("Invalid feature specification", "Invalid partition name", "Invalid account")
    for _, reason in zip(replay(version, "refused"), reasons, strict=True):
        with pytest.raises(LaunchError, match=reason) as caught:
            slurm_queue.ask_slurm(["sbatch"], host="me@login1")
        assert type(caught.value) is LaunchError


def tell(command):
    """Tells a job what was recorded: one that runs by a signal, one that waits otherwise."""
    job = slurm_queue.parse_job(SQUEUE.splitlines()["--batch" in command])
    slurm_queue.tell_job(job, "USR1", command[:-1], "me@login1")


@each_version
def test_jobs_of_others_cannot_be_told_and_those_that_have_changed_are_let_be(replay, version):
    for command in replay(version, "the job of another user"):
        with pytest.raises(LaunchError, match=r"ermission denied|Invalid user id"):
            tell(command)
    for command in replay(version, "a job that has ended"):
        with pytest.raises(LaunchError, match=r"already finished|Invalid job id"):
            slurm_queue.ask_slurm(command, host="me@login1")
        tell(command)
    for command in replay(version, "a job that nobody knows"):
        if command[0] == "sacct":
            assert slurm_queue.read_past_state("999", "me@login1") == ""
        else:
            tell(command)


@each_version
def test_a_cluster_without_accounts_says_nothing_and_one_whose_database_is_away_is_asked_again(replay, version):
    found = [slurm_queue.read_past_state("1", "me@login1") for _ in replay(version, "a cluster without accounts")]
    assert found == [""]
    for _ in replay(version, "slurmdbd is away"):
        with pytest.raises(SchedulerAwayError):
            slurm_queue.read_past_state("1", "me@login1")


SSH = """[ "$1 $2 $3 $4 $5 $6" = "-o BatchMode=yes -o ConnectTimeout=20 -- me@login1" ] && [ $# = 7 ] || exit 9
[ ! -e "$SEEN.words" ] || { cat "$SEEN.words" >&2; exit 255; }
exec sh -c "$7"
"""
"""Stands for ssh to me@login1: a shell gets the command; or it fails with the words of a file."""


@pytest.fixture
def put_programs(tmp_path, monkeypatch):
    """Puts programs of ours on the path; ssh fails with `words`, once they are there."""

    def put(words="", **programs):
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        (tmp_path / "seen.words").unlink(missing_ok=True)
        if words:
            (tmp_path / "seen.words").write_text(words)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return put


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(argument=HOSTILE, text=TEXT)
@example(argument="a\r\nb", text="a\r\nb")
def test_by_ssh_no_text_becomes_shell_and_the_script_arrives(put_programs, tmp_path, argument, text):
    put_programs(ssh=SSH, seen="""cat > "$SEEN.script"; printf '%s\\0' "$SLURM_TIME_FORMAT" "$@" > "$SEEN" """)
    slurm_queue.ask_slurm(["seen", argument], text, host="me@login1")
    assert (tmp_path / "seen").read_bytes().decode().split("\0") == ["%s", argument, ""]
    assert (tmp_path / "seen.script").read_bytes() == text.encode()
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("me@login1: Permission denied (publickey).", LaunchError),
        ("Host key verification failed.", LaunchError),
        ("ssh: Could not resolve hostname login1: Name or service not known", LaunchError),
        ("ssh: connect to host login1 port 22: No route to host", SchedulerAwayError),
        ("Connection to login1 closed by remote host.", SchedulerAwayError),
        ("ssh: connect to host login1 port 22: Connection refused", SchedulerAwayError),
    ],
)
def test_what_ssh_says_is_the_reason_and_an_absence_is_none_for_ever(put_programs, words, kind):
    put_programs(words, ssh=SSH)
    with pytest.raises(kind, match="me@login1: ") as caught:
        slurm_queue.list_jobs(host="me@login1")
    assert type(caught.value) is kind and words in caught.value.line


def test_a_launcher_by_ssh_refuses_a_host_without_slurm_or_without_the_folder(put_programs, tmp_path, monkeypatch):
    pairs = [*SETTINGS, f"run.storage_root={tmp_path}/root", "launch.slurm.host=me@login1"]
    launcher, spec = build_launcher(config.parse("", pairs)), make_spec(run_uri=f"{tmp_path}/root/runs/r")
    put_programs(
        ssh=SSH.replace("exec", f"PATH={tmp_path} exec").replace("sh -c", "/bin/sh -c"), env='exec /usr/bin/env "$@"'
    )
    with pytest.raises(LaunchError, match=r"me@login1: .*scontrol.*No such file"):
        launcher.check()
    put_programs(ssh=SSH, scontrol="echo ProctrackType=proctrack/cgroup")
    launcher.check()
    put_programs(ssh=SSH.replace('"$7"', '"echo no"'))
    with pytest.raises(LaunchError, match=r"launch.slurm.host: this host does not reach the folder.*run.storage_root"):
        launcher.run(spec)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match=r"this machine has no ssh .*install ssh"):
        launcher.check()


@pytest.mark.parametrize("host", ["-oProxyCommand=touch", "a b", "a;b", "$(x)"])
def test_a_host_is_a_name(host):
    pairs = [f"launch.slurm.host={json.dumps(host)}", "launch.slurm.python=/p"]
    with pytest.raises(ConfigError, match=r"launch.slurm.host"):
        config.parse("", pairs)


def test_a_host_needs_a_python_of_its_own():
    with pytest.raises(ConfigError, match="python names one of the nodes"):
        config.parse("launch: {slurm: {host: login1}}")
    config.parse("launch: {slurm: {host: login1, container: apptainer, container_image: x.sif}}")
