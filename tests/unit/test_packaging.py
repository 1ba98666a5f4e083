"""That the wheel will hold what the repository holds."""

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def setuptools_table():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib is new in 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def package_folders():
    """Package name -> folder, for every folder of ours with an __init__.py."""
    found = {}
    for top, prefix in (("kftrain", ""), ("components", "kftrain."), ("pipelines", "kftrain.")):
        for init in (ROOT / top).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT).as_posix()
            found[prefix + relative.replace("/", ".")] = relative
    return found


def test_every_package_is_listed_because_an_unlisted_one_is_missing_from_the_wheel(setuptools_table):
    assert sorted(setuptools_table["packages"]) == sorted(package_folders())


def test_every_folder_of_modules_is_a_package():
    folders = {path.parent for top in ("kftrain", "components", "pipelines") for path in (ROOT / top).rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_two_files_of_tests_have_the_same_name():
    """Their folders are no packages, so pytest collects neither of them."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_listed_folders_map_to_where_they_stand(setuptools_table):
    mapped = setuptools_table["package-dir"]
    for package, folder in package_folders().items():
        root = next(name for name in sorted(mapped, key=len, reverse=True) if package.startswith(name))
        assert folder == mapped[root] + package.removeprefix(root).replace(".", "/")


def test_data_files_of_packages_are_listed(setuptools_table):
    listed = {
        path
        for package, patterns in setuptools_table["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package_folders()[package]).glob(pattern)
    }
    files = {path for path in (ROOT / "kftrain").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == listed
