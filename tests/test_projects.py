"""The packages' metadata: what no file of ours may say, and what each must."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest's and hatchling's own need there

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = [
    ROOT,
    *sorted(
        path.parent
        for where in ("plugins", "examples")
        for path in ROOT.glob(f"{where}/*/pyproject.toml")
    ),
]
every_project = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def project_files(root):
    """Every pyproject.toml of the repository, templates too, but none of what is made or hidden."""
    made = {"build", "dist", "site", "node_modules"}
    for path in sorted(root.rglob("*pyproject.toml*")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(".") or part in made for part in parts):
            yield path


def load(path):
    return tomllib.loads(path.read_text(encoding="utf-8"))


def requirements(data):
    """Whatever the file says that something needs, to run, to build or as an extra."""
    project = data.get("project", {})
    lists = [
        project.get("dependencies", []),
        data.get("build-system", {}).get("requires", []),
        *project.get("optional-dependencies", {}).values(),
        *data.get("dependency-groups", {}).values(),
    ]
    return [Requirement(text) for some in lists for text in some if isinstance(text, str)]


def strangers(path):
    """Requirements on ``velox-core``, which on the package index isn't ours."""
    return [r for r in requirements(load(path)) if canonicalize_name(r.name) == "velox-core"]


def test_all_project_files_are_seen():
    found = list(project_files(ROOT))
    assert ROOT / "pyproject.toml" in found
    assert ROOT / "plugins" / "velox-tova" / "pyproject.toml" in found
    assert len(found) >= len(FOLDERS) >= 2


def test_none_depends_on_velox_core():
    """That name on the package index is a stranger's."""
    for path in project_files(ROOT):
        try:
            assert strangers(path) == [], path
        except tomllib.TOMLDecodeError:  # a template
            assert "velox-core" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    "line",
    [
        'dependencies = ["velox-core"]',
        'dependencies = ["attrs", "Velox_Core>=0.1,<1"]',
        'dependencies = ["velox.core[cuda] ; sys_platform == \\"linux\\""]',
        '[project.optional-dependencies]\nx = ["velox-core~=1.0"]',
    ],
)
def test_a_dependency_on_it_is_noticed(tmp_path, line):
    path = tmp_path / "pyproject.toml"
    path.write_text(f'[project]\nname = "x"\n{line}\n')
    assert len(strangers(path)) == 1


@every_project
def test_a_distribution_and_its_package(folder):
    """Distribution, package and build agree, and the package says that it is typed."""
    project = load(folder / "pyproject.toml")
    name = project["project"]["name"]
    if folder == ROOT:
        assert name == "velox-kv"
        package = "velox_core"
    else:
        assert name == folder.name
        package = name.replace("-", "_")
    assert (folder / package / "__init__.py").is_file()
    assert (folder / package / "py.typed").is_file()
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [package]
    assert project["project"]["license"] == "MIT"
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (folder / project["project"]["readme"]).is_file()


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_a_plugin_needs_the_core_within_bounds(folder):
    project = load(folder / "pyproject.toml")["project"]
    (core,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "velox-kv")
    bounds = {clause.operator: Version(clause.version) for clause in core.specifier}
    assert set(bounds) == {">=", "<"}
    version = load(ROOT / "pyproject.toml")["project"]["version"]
    assert core.specifier.contains(version), "not with the core beside it"
    assert project["requires-python"] == load(ROOT / "pyproject.toml")["project"]["requires-python"]
    (entry,) = project["entry-points"]["velox.policies"].items()
    assert entry[0] == folder.name.removeprefix("velox-")
    assert entry[1].startswith(folder.name.replace("-", "_") + ":")


def test_linux_gets_an_mlx_that_runs():
    """The plain ``mlx`` wheel has no backend there."""
    needs = [r for r in requirements(load(ROOT / "pyproject.toml")) if r.name == "mlx"]
    on_linux = [r for r in needs if r.marker.evaluate({"sys_platform": "linux", "extra": ""})]
    assert [sorted(r.extras) for r in on_linux if r.extras == {"cpu"}] == [["cpu"]]
    assert all(r.extras for r in on_linux)
    on_mac = [r for r in needs if r.marker.evaluate({"sys_platform": "darwin", "extra": ""})]
    assert [sorted(r.extras) for r in on_mac] == [[]]


def test_the_version_is_said_once():
    import velox_core

    assert velox_core.__version__ == load(ROOT / "pyproject.toml")["project"]["version"]
