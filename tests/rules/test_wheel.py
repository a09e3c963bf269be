"""A wheel contains the package and nothing else, and works from any directory."""

import shutil
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.slow

YAML_FOLDERS = ("data/datasets", "config/recipes")


def run(*words: str, cwd) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    """A wheel, built offline from a copy so that the build leaves nothing in the sources."""
    copy = tmp_path_factory.mktemp("sources")
    shutil.copytree(
        root / "flatout", copy / "flatout", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").write_text("")
    run(
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        "dist",
        cwd=copy,
    )
    (built,) = (copy / "dist").glob("flatout-*.whl")
    return built


def test_the_wheel_contains_the_package_and_nothing_else(wheel, root):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        p.relative_to(root).as_posix()
        for p in (root / "flatout").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert {name for name in sources if name not in names} == set()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"flatout"}
    assert "flatout/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.thorough
def test_the_installed_wheel_finds_its_entries_from_any_directory(wheel, root, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        str(site),
        str(wheel),
        cwd=elsewhere,
    )
    # -I keeps Python from importing this repository or an editable install of it.
    show = (
        f"import sys; sys.path.insert(0, {str(site)!r}); sys.argv[1:] = {{}}; from flatout.cli.main"
        " import main; main()"
    )
    for folder in YAML_FOLDERS:
        listed = run("-I", "-c", show.format(["list", folder.split("/")[1]]), cwd=elsewhere)
        for path in (root / "flatout" / folder).glob("*.yaml"):
            assert path.stem in listed, path
    machines = run("-I", "-c", show.format(["list", "machines"]), cwd=elsewhere)
    assert "h100-sxm" in machines
    assert run(
        "-I",
        "-c",
        f"import sys; sys.path.insert(0, {str(site)!r}); import flatout; print(flatout.__file__)",
        cwd=elsewhere,
    ).startswith(str(site))
    assert (site / "bin" / "flatout").exists()
