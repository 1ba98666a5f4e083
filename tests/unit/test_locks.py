"""What the images install: pinned with hashes, and what pyproject.toml and constraints.txt ask for."""

import functools
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
EXTRAS = runpy.run_path(str(IMAGES / "lock.py"))["EXTRAS"]
LOCKS = {
    "steps": ["steps/requirements.lock"],
    "trainer": ["trainer/requirements.lock", "trainer/cuda.lock"],
    "installer": ["installer.lock"],
    "sbom": ["sbom.lock"],
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")


@functools.cache
def entries(name):
    """Each pin of an image with its hashes: (requirement, hashes)."""
    found = []
    for lock in LOCKS[name]:
        text = re.sub(r"^\s*#.*\n", "", (IMAGES / lock).read_text(), flags=re.MULTILINE)
        for line in text.replace("\\\n", " ").splitlines():
            requirement, *hashes = line.split(" --hash=")
            found.append((Requirement(requirement), [each.strip() for each in hashes]))
    return found


def environments():
    """Those that an image may be of."""
    for python in PYTHONS:
        for machine in MACHINES:
            yield {
                "python_version": python,
                "python_full_version": f"{python}.5",
                "platform_machine": machine,
                "sys_platform": "linux",
                "platform_system": "Linux",
                "os_name": "posix",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }


def pins(name, environment):
    """Distribution -> version that an image has."""
    found = {}
    for requirement, _ in entries(name):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (only,) = requirement.specifier
            assert only.operator == "==" and canonicalize_name(requirement.name) not in found, requirement
            found[canonicalize_name(requirement.name)] = only.version
    return found


@pytest.fixture(scope="module")
def project():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is new in 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", LOCKS)
def test_everything_that_an_image_installs_has_a_hash(name):
    for requirement, hashes in entries(name):
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), requirement
    dockerfiles = [(IMAGES / each / "Dockerfile").read_text() for each in EXTRAS]
    allowed = ("--require-hashes -r ", "--no-build-isolation --no-deps .", '--no-cache "$@"')
    for line in (line for text in dockerfiles for line in text.splitlines() if "pip install" in line):
        assert any(part in line for part in allowed), line


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_what_the_project_and_the_extras_of_its_image_ask_for(project, name):
    asked = [
        *project["dependencies"],
        *(each for extra in EXTRAS[name] for each in project["optional-dependencies"][extra]),
    ]
    constrained = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    for environment in environments():
        found = pins(name, environment)
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement
        for requirement in map(Requirement, constrained):
            version = found.get(canonicalize_name(requirement.name))
            assert version is None or requirement.specifier.contains(version), requirement


def test_both_images_have_the_same_version_of_what_both_have():
    """The steps hash what workers read: shards, tokenizers, exports."""
    for environment in environments():
        steps, trainer = pins("steps", environment), pins("trainer", environment)
        common = steps.keys() & trainer
        assert {each: steps[each] for each in common} == {each: trainer[each] for each in common}


def test_torch_is_in_the_lock_of_the_trainer_alone_and_apart_from_the_rest():
    assert "torch" not in {requirement.name for requirement, _ in entries("steps")}
    apart = (IMAGES / "trainer" / "cuda.lock").read_text()
    rest = (IMAGES / "trainer" / "requirements.lock").read_text()
    (tested,) = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"\n{tested} \\" in apart and not re.search(r"^(torch|nvidia|cuda|triton)", rest, re.MULTILINE)


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """What the very command of the Dockerfiles finds in the environment of the tests."""
    texts = [(IMAGES / name / "Dockerfile").read_text() for name in EXTRAS]
    (command,) = {re.search(r"/cyclonedx-py (.*?\S)\n\nFROM", text, re.DOTALL)[1].replace("\\\n", "") for text in texts}
    arguments = command.replace('"$(command -v python3)"', sys.executable).split()
    path = tmp_path_factory.mktemp("sbom") / "sbom.json"
    arguments[arguments.index("--output-file") + 1] = str(path)
    tool = Path(sys.executable).with_name("cyclonedx-py")
    subprocess.run([tool, *arguments], cwd=ROOT, check=True, capture_output=True)
    return path.read_text()


def test_what_is_installed_is_listed(listed):
    found = json.loads(listed)
    assert found["metadata"]["component"]["name"] == "kftrain"
    components = {component["name"]: component for component in found["components"]}
    for name in ("torch", "mlflow", "PyYAML"):
        assert components[name]["version"] == importlib.metadata.version(name)
    assert components["mlflow"]["purl"] == f"pkg:pypi/mlflow@{importlib.metadata.version('mlflow')}"


@pytest.mark.slow
def test_the_list_is_valid_cyclonedx(listed):
    version = SchemaVersion.from_version(json.loads(listed)["specVersion"])
    assert JsonStrictValidator(version).validate_str(listed) is None


@pytest.mark.parametrize("engine", ["docker", "podman", "buildah"])
def test_the_list_of_an_image_is_read_from_the_image(tmp_path, engine):
    program = tmp_path / engine
    program.write_text(
        f"#!/bin/sh\necho \"$@\" >> {tmp_path}/calls\ncase $1 in from) echo box;; run) echo '{{}}';; esac\n"
    )
    program.chmod(0o755)
    done = subprocess.run([IMAGES / "sbom.sh", program, "steps:1"], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    if engine == "buildah":
        assert calls == ["from --pull-never steps:1", "run box -- cat /opt/kftrain/sbom.json", "rm box"]
    else:
        assert calls == ["run --rm --entrypoint cat steps:1 /opt/kftrain/sbom.json"]


def test_make_images_writes_the_lists():
    made = subprocess.run(
        ["make", "-n", "images", "ENGINE=podman"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "images/sbom.sh podman kftrain-$name:" in made.stdout and "> build/sbom-$name.json" in made.stdout
