"""The examples: packages that a reader may copy, installed and tested as their authors would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))


def test_there_is_one():
    assert [example.name for example in EXAMPLES] == ["velox-l2norm"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_its_own_tests_pass(example, tmp_path):
    """With the metadata of an installation: they load the policy by its name."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "--target", str(site), str(example)])
    out = run(["-m", "pytest", "-q", "-o", f"cache_dir={cache}", str(example)], PYTHONPATH=site)
    assert re.search(r"^\d+ passed in ", out, re.MULTILINE), out


def run(args, **variables):
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run([sys.executable, *args], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_guide_says_of_it():
    """How long it is, and how good."""
    lines = (ROOT / "examples/velox-l2norm/velox_l2norm/__init__.py").read_text().splitlines()
    readme = (ROOT / "examples/velox-l2norm/README.md").read_text(encoding="utf-8")
    for page in ("tutorial.md", "policies/index.md"):
        assert f"{len(lines)} lines" in (ROOT / "docs" / page).read_text(encoding="utf-8")
    said = (ROOT / "docs/policies/index.md").read_text(encoding="utf-8")
    (passage,) = re.findall(r"^## An example\n(.*?)^## ", said, re.MULTILINE | re.DOTALL)
    figures = re.findall(r"\d+\.\d\d\b", passage)
    assert len(figures) == 4
    assert all(figure in readme for figure in figures)
