"""`kftrain submit` through kfp's real client, against a scripted API server."""

import datetime
import os
import signal
import subprocess
import sys

import pytest
import yaml
from helpers.fakes import kfp_server
from helpers.fakes.kfp_server import RUN_ID, run

from kftrain import cli, config
from kftrain.client import submit
from kftrain.kubeflow import submission
from kftrain.kubeflow.submission import RunState
from kftrain.pipelines.compile import compiled, version_name

CONFIG = """
run: {name: lm, storage_root: "s3://bucket/root"}
tracking: {uri: "http://mlflow:5000"}
launch: {backend: pytorchjob, nodes: 2}
"""
STEPS = frozenset({"shard", "train", "evaluate", "register", "finish"})


pytestmark = pytest.mark.usefixtures("nobody_logged_in")


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def call(server, config_file, capfd):
    """Runs `kftrain submit` against the server; gives exit code, stdout and stderr."""

    def run_command(*arguments, host=server.url):
        with pytest.raises(SystemExit) as caught:
            cli.main(["submit", "--config", config_file, "--host", host, *arguments])
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return run_command


def test_the_first_time_everything_is_created(server, call, config_file):
    code, out, err = call("--resume", "lm-1", "--name", "nightly", "--experiment", "ours")
    assert code == 0
    assert out == f"{RUN_ID}\n{server.url}/#/runs/details/{RUN_ID}\n"
    assert (server.pipelines[0]["name"], server.experiments[0]["display_name"]) == ("kftrain-train", "ours")
    assert (server.versions[0]["name"], server.versions[0]["text"]) == (version_name(), compiled())
    (started,) = server.runs
    assert started["pipeline_version_reference"] == {"pipeline_id": "p-0", "pipeline_version_id": "v-0"}
    assert (started["display_name"], started["experiment_id"]) == ("nightly", "e-0")
    sent = started["runtime_config"]["parameters"]
    assert sent.keys() == {"config", "resume_run"} and sent["resume_run"] == "lm-1"
    assert config.parse(sent["config"]) == config.load(config_file, [f"tracking.kubeflow_url={server.url}"])
    wanted = yaml.safe_load(CONFIG)
    wanted["tracking"]["kubeflow_url"] = server.url
    assert yaml.safe_load(sent["config"]) == wanted, "what differs from the defaults, nothing else"
    assert f"version {version_name()} uploaded" in err and "s3://bucket/root/runs/lm-1" in err


def test_the_second_time_only_a_run_is_created(server, call):
    call()
    server.requests.clear()
    code, _, err = call()
    assert code == 0 and len(server.runs) == 2
    assert [request.path for request in server.requests if request.method == "POST"] == ["/apis/v2beta1/runs"]
    assert f"version {version_name()} is there already" in err


def test_another_content_is_another_version(server, call):
    call()
    server.versions[0].update(name="kftrain-train-0.0.1-00000000", display_name="kftrain-train-0.0.1-00000000")
    call()
    assert [version["name"] for version in server.versions] == ["kftrain-train-0.0.1-00000000", version_name()]
    assert server.runs[1]["pipeline_version_reference"]["pipeline_version_id"] == "v-1"


@pytest.mark.parametrize("kind", ["pipelines", "versions", "experiments"])
def test_what_somebody_else_creates_at_the_same_time_is_used(kind, server, call):
    server.races = {kind}
    code, _, err = call()
    assert code == 0, err
    assert len(getattr(server, kind)) == 1 and len(server.runs) == 1


def test_a_run_is_named_after_its_configuration(server, call):
    call()
    assert server.experiments[0]["display_name"] == "lm"
    name, _, rest = server.runs[0]["display_name"].partition("-")
    assert name == "lm" and datetime.datetime.strptime(rest, "%Y%m%d-%H%M%S")


def test_waiting_shows_each_change_of_a_step_and_ends_with_the_run(server, call):
    server.script = [
        run("PENDING"),
        run("RUNNING", {"shard": "RUNNING"}),
        run("RUNNING", {"shard": "RUNNING"}),
        run("RUNNING", {"shard": "SUCCEEDED", "train": "RUNNING", "evaluate": None}),
        run("SUCCEEDED", {"shard": "SUCCEEDED", "train": "SUCCEEDED", "finish": "SUCCEEDED"}),
    ]
    code, out, err = call("--wait")
    assert code == 0 and out.splitlines()[0] == RUN_ID
    assert err.splitlines()[3:] == [
        "shard: running",
        "shard: succeeded",
        "train: running",
        "finish: succeeded",
        "train: succeeded",
        "the run succeeded",
    ]


def test_a_failed_run_is_exit_code_13_with_the_steps_that_failed(server, call):
    ended = {"shard": "SUCCEEDED", "train": "FAILED", "finish": "SUCCEEDED", "evaluate": None}
    server.script = [run("RUNNING", {"train": "RUNNING"}), run("FAILED", ended, ["PENDING", "RUNNING", "FAILED"])]
    code, _, err = call("--wait")
    assert code == 13
    assert err.splitlines()[-1] == (
        f"kftrain: error: {server.url}/#/runs/details/{RUN_ID}: the run failed in train; "
        f"see error.json in s3://bucket/root/runs/lm-0b1c2d3e4f50"
    )


def test_a_run_that_was_terminated_says_so(server, call):
    history = ["PENDING", "RUNNING", "CANCELING", "FAILED"]
    server.script = [run("FAILED", {"train": "RUNNING", "finish": "SUCCEEDED"}, history)]
    code, _, err = call("--wait")
    assert code == 13 and err.endswith(": the run was canceled in train\n") and "failed" not in err


@pytest.mark.parametrize("trouble", [503, 500, kfp_server.DROPPED])
def test_an_api_server_that_is_away_for_a_moment_is_ridden_out(trouble, server, call):
    server.script = [run("RUNNING"), *[trouble] * 5, run("SUCCEEDED")]
    code, _, err = call("--wait")
    assert code == 0 and err.count("no answer, trying again: ") == 1 and err.endswith("the run succeeded\n")


def test_the_limit_of_an_outage_starts_anew_with_every_answer(server, call, monkeypatch):
    monkeypatch.setattr(submit, "OUTAGE_SECONDS", 0.5)
    server.script = [*[run("RUNNING")] * 60, 503, run("SUCCEEDED")]
    assert call("--wait")[0] == 0


@pytest.mark.timeout(240)
def test_an_api_server_that_stays_away_ends_the_waiting_not_the_run(server, call, monkeypatch):
    monkeypatch.setattr(submit, "OUTAGE_SECONDS", 0.1)
    server.script = [run("RUNNING"), 503]
    code, _, err = call("--wait")
    assert code == 13 and "the run may go on" in err and "503" in err.splitlines()[-1]


@pytest.mark.parametrize(("status", "hint"), [(401, "--existing-token-env"), (404, "the run was deleted; submit it")])
def test_an_answer_that_no_waiting_mends_ends_the_waiting(status, hint, server, call):
    server.script = [run("RUNNING")]
    server.answers["GET", f"/runs/{RUN_ID}"] = (status, {"message": "run not found"})
    code, _, err = call("--wait")
    assert code == 13 and hint in err.splitlines()[-1] and len(server.asked("GET", "runs/.*")) == 1


@pytest.mark.timeout(240)
def test_a_run_that_takes_too_long_is_left_alone(server, call):
    server.script = [run("RUNNING")]
    code, _, err = call("--wait", "--timeout-seconds", "0.05")
    assert code == 13 and "has not ended after 0.05 s; it goes on" in err
    assert not server.asked("POST", "runs/.*")


@pytest.mark.parametrize("host", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_wrong_host_is_one_line(host, config_file):
    command = [sys.executable, "-m", "kftrain", "submit", "--config", config_file, "--host", host]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (13, "")
    assert done.stderr.startswith(f"kftrain: error: {host}: Kubeflow Pipelines cannot be reached")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1:8888", "ftp://somewhere", "http://", "http://[::1"])
def test_what_is_no_url_is_refused(host, call):
    code, _, err = call(host=host)
    assert code == 10 and "--host" in err


@pytest.mark.parametrize("answer", ["<html>log in</html>", [1]])
def test_a_login_page_is_not_taken_for_an_api_server(answer, server, call):
    server.answers["GET", "/healthz"] = (200, answer)
    code, _, err = call()
    assert code == 13 and "login page" in err and len(server.requests) == 1


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("launch.backend=local", "launch.backend"),
        ("run.storage_root=/data/root", "run.storage_root"),
        ("tracking.uri=sqlite:///mlflow.db", "tracking.uri"),
        ("tracking.uri=http://ana:hunter2@mlflow:5000", "tracking.uri"),
        ("data.source=./texts", "data.source"),
        ("data.source=texts.jsonl", "data.source"),
    ],
)
def test_what_works_on_this_machine_only_is_refused_before_anything_is_asked(override, where, server, call):
    code, out, err = call("--set", override)
    assert (code, out) == (13, "") and server.requests == []
    assert err.startswith(f"kftrain: error: {where}: ") and err.count("\n") == 1
    assert "hunter2" not in err


@pytest.mark.parametrize("source", ["digits", "s3://bucket/texts", "my.module:texts"])
def test_sources_that_pods_can_read_are_sent(source, server, call):
    assert call("--set", f"data.source={source}")[0] == 0
    sent = yaml.safe_load(server.runs[0]["runtime_config"]["parameters"]["config"])
    assert sent["data"]["source"] == source


def test_a_folder_is_refused_even_if_workers_mount_one_there_because_the_steps_do_not(server, call):
    code, _, err = call(
        "--set", "run.storage_root=/data", "--set", "launch.kubernetes.volumes=[{name: d, emptyDir: {}}]"
    )
    assert code == 13 and "the pipeline's steps" in err and server.requests == []


def test_a_token_is_sent_and_never_shown(server, call, monkeypatch):
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "s3cr3t")
    code, out, err = call()
    assert code == 0 and {request.headers["Authorization"] for request in server.requests} == {"Bearer s3cr3t"}
    server.answers["POST", "/runs"] = (403, {"message": "denied"})
    refused = call()
    assert refused[0] == 13 and "denied; check your rights" in refused[2]
    assert "s3cr3t" not in out + err + refused[1] + refused[2]


def test_a_token_may_be_in_another_variable_which_must_then_be_set(server, call, monkeypatch):
    assert call("--existing-token-env", "OURS")[0] == 10
    monkeypatch.setenv("OURS", "s3cr3t")
    assert call("--existing-token-env", "OURS")[0] == 0
    assert server.requests[-1].headers["Authorization"] == "Bearer s3cr3t"


def test_a_pods_token_is_read_from_its_file_for_every_request(server, call, monkeypatch, tmp_path):
    (tmp_path / "token").write_text("of-the-pod\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", f"{tmp_path}/token")
    assert call()[0] == 0
    assert {request.headers["Authorization"] for request in server.requests} == {"Bearer of-the-pod"}


def test_a_multi_user_installation_wants_a_namespace_and_gets_it(server, call):
    server.multi_user = True
    assert call()[0] == 10
    code, _, err = call("--namespace", "team")
    assert code == 0, err
    assert server.pipelines[0]["namespace"] == server.experiments[0]["namespace"] == "team"
    (lookup,) = server.asked("GET", "pipelines/names/.*")
    assert lookup.query == {"namespace": "team"}


def test_the_namespace_and_the_cookie_of_kfps_own_context_count(server, call, tmp_path):
    server.multi_user = True
    (tmp_path / "context.json").write_text('{"namespace": "mine", "client_authentication_cookie": "session=7"}')
    assert call()[0] == 0
    assert server.experiments[0]["namespace"] == "mine"
    assert {request.headers["Cookie"] for request in server.requests} == {"session=7"}


def test_a_single_user_installation_has_no_namespaces(server, call):
    code, _, err = call("--namespace", "team")
    assert code == 10 and "not multi-user" in err and not server.pipelines


@pytest.mark.parametrize("trouble", [(502, "bad gateway"), (200, kfp_server.DROPPED)])
def test_a_run_that_may_or_may_not_have_started_is_not_started_again(trouble, server, call):
    server.answers["POST", "/runs"] = trouble
    code, out, err = call("--name", "nightly")
    assert (code, out) == (13, "") and "may have been started or not" in err and "look for nightly" in err
    assert len(server.asked("POST", "runs")) == 1


def test_the_ui_may_be_at_another_address(server, call, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_UI_ENDPOINT", "https://ui.example/pipeline/")
    assert call()[1].splitlines()[1] == f"https://ui.example/pipeline/#/runs/details/{RUN_ID}"


@pytest.mark.parametrize(
    ("host", "override", "url"),
    [
        ("https://ana:hunter2@kubeflow.example/pipeline/", "run.name=a", "https://kubeflow.example/pipeline"),
        ("http://localhost:8080", "tracking.kubeflow_url=https://ui.example", "https://ui.example"),
    ],
)
def test_mlflow_will_lead_to_the_ui_and_knows_no_password(host, override, url, call):
    code, out, _ = call("--dry-run", "--set", override, host=host)
    sent = yaml.safe_load(yaml.safe_load(out)["parameters"]["config"])
    assert (code, sent["tracking"]["kubeflow_url"]) == (0, url) and "hunter2" not in out


def test_a_private_certificate_is_trusted_if_named(config_file, capfd, tmp_path):
    with kfp_server.Server(certificate=self_signed(tmp_path)) as server:
        codes = []
        for extra in ([], ["--ca-file", f"{tmp_path}/certificate.pem"]):
            with pytest.raises(SystemExit) as caught:
                cli.main(["submit", "--config", config_file, "--host", server.url, *extra])
            codes.append(caught.value.code)
    assert codes == [13, 0], capfd.readouterr().err
    err = capfd.readouterr().err
    assert "CERTIFICATE_VERIFY_FAILED" in err.splitlines()[0] and len(server.runs) == 1


def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(server, call, config_file):
    code, out, _ = call("--dry-run", "--name", "nightly")
    assert code == 0 and server.requests == []
    shown = yaml.safe_load(out)
    assert (shown["pipeline"], shown["version"], shown["run"]) == ("kftrain-train", version_name(), "nightly")
    assert yaml.safe_load(shown["parameters"]["config"])["launch"] == yaml.safe_load(CONFIG)["launch"]
    assert shown["parameters"]["resume_run"] == ""
    assert "\\n" not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--host", "http://h", "--timeout-seconds", "3"], "needs --wait"),
        ([], "'--host'"),
        (["--ca-file", "no.pem"], "no.pem"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, part, config_file, capfd):
    with pytest.raises(SystemExit) as caught:
        cli.main(["submit", "--config", config_file, *arguments])
    assert caught.value.code == 2 and part in capfd.readouterr().err


def test_ctrl_c_while_waiting_leaves_the_run_alone(server, config_file, tmp_path):
    server.script = [run("RUNNING", {"train": "RUNNING"})]
    command = [sys.executable, "-m", "kftrain", "submit", "--config", config_file, "--host", server.url, "--wait"]
    image = ["--steps-image", "registry/steps:7"]
    process = subprocess.Popen(
        [*command, *image],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        assert server.run_was_read.wait(240)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    last = err.splitlines()[-1]
    assert "the run goes on" in last and f"POST {server.url}/apis/v2beta1/runs/{RUN_ID}:terminate" in last
    assert out.splitlines()[0] == RUN_ID and "Traceback" not in err and "Warning" not in err
    assert not server.asked("POST", "runs/.*")
    assert "image: registry/steps:7" in server.versions[0]["text"] and server.versions[0]["name"] != version_name()


def test_the_steps_of_the_pipeline_are_its_tasks_with_a_container():
    assert submission.read_steps(compiled()) == STEPS


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([("train-driver", "RUNNING"), ("train", "PENDING")], {"train": "PENDING"}),
        ([("train-driver", "FAILED")], {"train": "FAILED"}),
        ([("train", "RUNNING"), ("train(0)", "FAILED"), ("train(1)", "RUNNING")], {"train": "RUNNING"}),
        ([("train", "SUCCEEDED"), ("train", "FAILED")], {"train": "FAILED"}),
        ([("train", None), ("executor", "FAILED"), ("run", "FAILED")], {}),
    ],
)
def test_the_state_of_a_step_is_taken_from_the_rows_of_its_name(rows, expected):
    assert submission.compute_run_state("RUNNING", [], rows, STEPS).steps == expected


def test_what_has_ended_is_told_before_what_begins():
    before = RunState("RUNNING", steps={"train": "RUNNING"})
    now = RunState("RUNNING", steps={"train": "SUCCEEDED", "evaluate": "RUNNING"})
    assert submission.describe_changes(before, now) == ["train: succeeded", "evaluate: running"]
    assert submission.describe_changes(now, now) == []


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (RunState("SUCCEEDED"), "the run succeeded"),
        (RunState("SUCCEEDED", canceled=True), "the run succeeded"),
        (RunState("FAILED", steps={"train": "FAILED", "finish": "FAILED"}), "the run failed in finish, train"),
        (RunState("FAILED"), "the run failed, but none of its steps"),
        (RunState("CANCELED", canceled=True), "the run was canceled"),
        (RunState("SKIPPED"), "the run was skipped"),
    ],
)
def test_every_end_has_its_words(state, text):
    assert state.ended and submission.describe_outcome(state) == text


def self_signed(folder):
    """A certificate for 127.0.0.1 with its key, in one file; the certificate alone is in certificate.pem."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kfp")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    pem = serialization.Encoding.PEM
    certificate = builder.add_extension(address, critical=False).sign(key, hashes.SHA256()).public_bytes(pem)
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "both.pem").write_bytes(certificate + private)
    return str(folder / "both.pem")
