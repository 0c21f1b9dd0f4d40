"""`velox new`: what it writes is a package that installs and passes, and it overwrites nothing."""

import os
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from velox_core.cli import main
from velox_core.cli.new import TEMPLATE, Names
from velox_core.testing import CHECKS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
AUTHOR = 'Ann "O" Öther <ann@example.org>'


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(*args):
    return CliRunner().invoke(main, ["new", *args])


def refused(*args):
    """The line with which it refuses."""
    result = new(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# The package


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A new package."""
    folder = tmp_path_factory.mktemp("new")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert new("my-policy", "--author", AUTHOR).exit_code == 0
    finally:
        os.chdir(before)
    return folder / "my-policy"


@pytest.fixture(scope="module")
def site(project, tmp_path_factory):
    """A folder with the package installed."""
    site = tmp_path_factory.mktemp("site")
    command = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*command, "--target", str(site), str(project)], project.parent)
    return site


def run(args, folder, site=None):
    environment = {**os.environ, "PYTHONPATH": str(site)} if site else None
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_it_holds(project):
    assert files(project) == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "my_policy/__init__.py",
        "my_policy/py.typed",
        "pyproject.toml",
        "tests/test_my_policy.py",
    }
    assert {path.name for path in project.parent.iterdir()} <= {"my-policy", "cache"}
    for path in files(project):
        text = (project / path).read_text()
        assert "__package__" not in text
        assert "$" not in text.replace("${{ matrix", "")
    assert project.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask():
    old = os.umask(0)
    os.umask(old)
    return old


def test_metadata(project, site):
    (info,) = site.glob("my_policy-*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text())
    assert metadata["Name"] == "my-policy"
    assert metadata["Author-email"] == '"Ann \\"O\\" Öther" <ann@example.org>'
    assert metadata["License-Expression"] == "MIT"
    assert "velox-kv<0.2,>=0.1" in metadata.get_all("Requires-Dist")
    entries = (info / "entry_points.txt").read_text()
    assert entries.split() == ["[velox.policies]", "my-policy", "=", "my_policy:MyPolicy"]
    assert 'Ann "O" Öther' in (project / "LICENSE").read_text()
    assert (site / "my_policy" / "py.typed").exists()


def test_its_tests_pass(project, site):
    out = run(["-m", "pytest", "-q", "-o", f"cache_dir={project.parent / 'cache'}"], project, site)
    assert f"{2 * len(CHECKS) + 2} passed" in out  # twice the suite, and two of its own


def test_it_is_clean(project):
    run(["-m", "ruff", "check", "--no-cache", "."], project)
    run(["-m", "ruff", "format", "--no-cache", "--check", "."], project)


def test_its_types_are_right(project):
    run(["-m", "mypy", "--cache-dir", str(ROOT / ".mypy_cache" / "new")], project)


def test_velox_sees_it(project, site):
    out = run(["-m", "velox_core.cli", "policies"], project, site)
    assert "│ my-policy " in out


def test_its_workflow_is_yaml(project):
    workflow = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["runs-on"] == "${{ matrix.os }}"
    assert [step["run"] for step in job["steps"] if "run" in step] == [
        "python -m pip install -e '.[dev]'",
        "python -m ruff check .",
        "python -m ruff format --check .",
        "python -m mypy",
        "python -m pytest",
    ]


def test_the_wheel_has_the_template():
    pytest.importorskip("hatchling")
    from hatchling.builders.wheel import WheelBuilder

    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"velox_core/cli/template/{name}" for name in files(TEMPLATE)} <= packed
    assert len(files(TEMPLATE)) == 8


# Other names


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("velox-foo", Names("velox-foo", "velox_foo", "foo", "Foo")),
        ("My_Great.Policy", Names("my-great-policy", "my_great_policy", "my-great-policy",
                                  "MyGreatPolicy")),
        ("velox-2x", Names("velox-2x", "velox_2x", "2x", "Velox2x")),
        ("policy", Names("policy", "policy", "policy", "PolicyPolicy")),
        ("velox-rows", Names("velox-rows", "velox_rows", "rows", "RowsPolicy")),
        ("velox-none", Names("velox-none", "velox_none", "none", "NonePolicy")),
        ("none-such", Names("none-such", "none_such", "none-such", "NoneSuch")),
    ],
)  # fmt: skip
def test_names(name, names):
    assert Names.of(name) == names


@pytest.mark.parametrize("name", ["a", "x" * 40, "velox-none", "velox-2x", "check"])
def test_the_code_is_clean_whatever_the_name(here, name):
    assert new(name).exit_code == 0
    assert list(here.iterdir()) == [here / name]
    run(["-m", "ruff", "check", "--no-cache", name], here)
    run(["-m", "ruff", "format", "--no-cache", "--check", name], here)
    project = tomllib.loads((here / name / "pyproject.toml").read_text())["project"]
    assert "authors" not in project
    assert f"the authors of {name}" in (here / name / "LICENSE").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "can't be a distribution's name"),
        ("my policy", "can't be a distribution's name"),
        ("-my", "can't be a distribution's name"),
        ("my-", "can't be a distribution's name"),
        ("../my", "can't be a distribution's name"),
        ("my/policy", "can't be a distribution's name"),
        ("polícy", "can't be a distribution's name"),
        ("my\npolicy", "can't be a distribution's name"),
        ("3d", "gives no importable package (3d)"),
        ("class", "gives no importable package (class)"),
        ("json", "a package 'json' would hide another one"),
        ("mlx-lm", "a package 'mlx_lm' would hide another one"),
        ("tests", "a package 'tests' would hide another one"),
        ("x" * 41, "is longer than 40 characters"),
    ],
)
def test_names_that_cant_be(here, name, said):
    assert said in refused("--", name)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["velox", "velox-kv", "velox-core", "velox-tova", "velox-h2o", "velox-morphkv",
     "velox-streaming", "tova", "h2o", "morphkv", "streaming", "Velox_TOVA", "velox.kv"],
)  # fmt: skip
def test_names_of_ours(here, name):
    assert "is a name of velox's own" in refused(name)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("author", "entry"),
    [
        ("Ann Other", {"name": "Ann Other"}),
        ("Ann Other <ann@example.org>", {"name": "Ann Other", "email": "ann@example.org"}),
        ("O'Neil \\ ${name}", {"name": "O'Neil \\ ${name}"}),
    ],
)
def test_authors(here, author, entry):
    assert new("mine", "--author", author).exit_code == 0
    assert tomllib.loads((here / "mine/pyproject.toml").read_text())["project"]["authors"] == [
        entry
    ]
    assert entry["name"] in (here / "mine/LICENSE").read_text()


@pytest.mark.parametrize("author", ["", " ", "Ann\nOther", "<a@b>", "Ann <nowhere>", "Ann <a@b> x"])
def test_authors_that_cant_be(here, author):
    assert "--author" in refused("mine", "--author", author)
    assert list(here.iterdir()) == []


# Nothing overwritten, nothing half done


@pytest.mark.parametrize("what", ["folder", "empty", "file", "link"])
def test_what_exists_is_left_alone(here, what):
    if what == "file":
        (here / "mine").write_text("text")
    elif what == "link":
        (here / "mine").symlink_to("nowhere")
    else:
        (here / "mine").mkdir()
        if what == "folder":
            (here / "mine" / "kept").write_text("text")
    before = files(here)
    assert "mine exists already, and nothing is ever overwritten" in refused("mine")
    assert files(here) == before
    assert [path.name for path in here.iterdir()] == ["mine"]


def test_a_failure_leaves_nothing(here, monkeypatch):
    written = []

    def full(self, text, **kwargs):
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return len(text)

    monkeypatch.setattr(Path, "write_text", full)
    assert "can't write mine: No space left on device" in refused("mine")
    assert list(here.iterdir()) == []


def test_next_steps(here):
    result = new("velox-mine")
    assert result.stderr == ""
    assert result.stdout == (
        "velox-mine/ has a package with the policy 'mine'. Next:\n\n"
        "  cd velox-mine\n"
        f"  {Path(sys.executable).name} -m pip install -e '.[dev]'\n"
        "  pytest\n"
        "  velox check mine\n\n"
        "The rule is in velox_mine/__init__.py: make it yours, and its test with it.\n"
    )
