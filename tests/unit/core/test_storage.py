import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kftrain import storage
from kftrain.errors import ConfigError


@pytest.fixture(params=["folder", "memory"])
def root(request, tmp_path):
    return str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}-{os.getpid()}"


def test_published_content_is_read_back_and_replaced_as_a_whole(root):
    uri = storage.join(root, "a", "b.json")
    storage.publish_json(uri, {"x": 1})
    storage.publish_json(uri, {"x": 2})
    assert storage.read_json(uri) == {"x": 2}
    assert storage.list_names(storage.join(root, "a")) == ["b.json"]
    assert storage.size_bytes(uri) == len(storage.read_bytes(uri))
    assert storage.sha256_file(uri) == storage.sha256_bytes(storage.read_bytes(uri))


def test_of_many_creators_exactly_one_wins(tmp_path):
    uri = storage.join(str(tmp_path), "claim")

    def attempt(number):
        try:
            storage.create(uri, str(number))
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(attempt, range(64)) if number is not None]
    assert len(winners) == 1
    assert storage.read_text(uri) == str(winners[0])
    assert storage.list_names(str(tmp_path)) == ["claim"]


def test_create_refuses_what_exists(root):
    uri = storage.join(root, "x")
    storage.create(uri, "1")
    with pytest.raises(FileExistsError):
        storage.create(uri, "2")
    assert storage.read_text(uri) == "1"


def test_missing_things_are_missing(root):
    uri = storage.join(root, "none")
    assert not storage.exists(uri)
    assert storage.read_json_if_exists(uri) is None
    assert storage.list_names(uri) == []
    storage.remove(uri)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(uri)


def test_a_new_folder_appears_as_a_whole_or_not_at_all(root):
    uri = storage.join(root, "folder")
    with pytest.raises(RuntimeError), storage.new_folder(uri) as path:
        (path / "half").write_text("x")
        raise RuntimeError
    assert not storage.exists(uri)
    with storage.new_folder(uri) as path:
        (path / "sub").mkdir()
        (path / "sub" / "whole").write_text("x")
        if storage.is_local(uri):
            assert not storage.exists(uri)
    assert storage.read_text(storage.join(uri, "sub", "whole")) == "x"


def test_a_folder_that_came_first_stays(tmp_path):
    uri = storage.join(str(tmp_path), "folder")
    with storage.new_folder(uri) as mine:
        (mine / "f").write_text("mine")
        with storage.new_folder(uri) as other:
            (other / "f").write_text("other")
    assert storage.read_text(storage.join(uri, "f")) == "other"
    assert storage.list_names(str(tmp_path)) == ["folder"]


def test_published_files_are_readable_by_others(tmp_path):
    uri = storage.join(str(tmp_path), "x")
    storage.publish(uri, "1")
    assert stat.S_IMODE(os.stat(uri).st_mode) == storage.PUBLISHED_MODE


@pytest.mark.parametrize("part", ["../x", "a/../../x", "/etc/passwd", ".."])
def test_names_may_not_leave_their_folder(part):
    with pytest.raises(ConfigError):
        storage.join("/root", part)


def test_an_unknown_scheme_names_what_to_install():
    with pytest.raises(ConfigError, match="no driver for nosuch://"):
        storage.exists("nosuch://bucket/x")


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_content(tmp_path):
    """Kills a process that replaces a file in a loop: a reader must see nothing but a whole version."""
    uri = str(tmp_path / "f.json")
    storage.publish_json(uri, [0] * 10_000)
    script = (
        "import sys; from kftrain import storage\n"
        "for i in range(1, 10**6):\n"
        "    storage.publish_json(sys.argv[1], [i % 10] * 10_000)\n"
        "    if i == 1: print('on', flush=True)\n"
    )
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", script, uri], stdout=subprocess.PIPE)
        process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
        content = storage.read_json(uri)
        assert len(content) == 10_000 and len(set(content)) == 1
