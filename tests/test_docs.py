"""The guide: its code runs, its tutorial is true to the line, its tables say what the code does."""

import inspect
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import attrs
import click
import pytest
import tiny_folder

import velox_core
from velox_core import discovery, model, testing
from velox_core.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
MODEL = "mlx-community/SmolLM2-135M-Instruct"
POLICIES = {"tova": "TOVA", "h2o": "H2O", "morphkv": "MorphKV", "streaming": "StreamingLLM"}

#: A fenced block: its language, what else is said of it, and the text.
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page):
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page, *languages):
    return [block for block in FENCE.findall(read(page)) if block[0] in languages]


def rows_of(text, heading):
    """The cells of the table with that first heading."""
    lines = text[text.index(f"| {heading} |") :].splitlines()
    rows = []
    for line in lines[2:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def names_in(cell):
    return re.findall(r"`([^`]+)`", cell)


# Code


@pytest.fixture(scope="module")
def with_model(tmp_path_factory):
    """A folder in which the model that the guide names is a tiny one."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / MODEL).mkdir(parents=True)
    tiny_folder.write(folder / MODEL, template=tiny_folder.TEMPLATE, head_dim=64)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page != "tutorial.md"])
def test_python(page, with_model, monkeypatch):
    """A page's code runs from top to bottom."""
    monkeypatch.chdir(with_model)
    names = {"__name__": "guide"}
    for _, _, code in blocks(page, "python"):
        exec(compile(code, page, "exec"), names)


def command_lines():
    for page in PAGES:
        for language, _, text in blocks(page, "sh", "console"):
            for line in text.replace("\\\n", " ").splitlines():
                if language == "console" and not line.startswith("$ "):
                    continue
                words = shlex.split(line.removeprefix("$ "))
                words = words[next((i for i, word in enumerate(words) if "=" not in word), 0) :]
                if words[:1] == ["velox"]:
                    yield pytest.param(words[1:], id=f"{page}: {' '.join(words[1:3])}")


@pytest.mark.parametrize("words", list(command_lines()))
def test_commands_have_these_options(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".txt", ".jsonl")):
            Path(word).touch()  # what a reader has
    command = main
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    with click.Context(main) as context:
        command.make_context(command.name, words, parent=context)  # parses, and runs nothing


# The tutorial


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A folder to work in, and the variables of an environment that has velox and takes more."""
    sys.path.insert(0, str(ROOT / "tools"))
    import smollm2

    folder = tmp_path_factory.mktemp("ann")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    bin_ = folder / "env" / "bin"
    found = subprocess.run(
        [bin_ / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    outer = sysconfig.get_path("purelib")
    Path(found, "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    script = f"#!{bin_ / 'python'}\nfrom velox_core.cli import main\nmain()\n"
    (bin_ / "velox").write_text(script)
    (bin_ / "velox").chmod(0o755)
    (folder / "home" / Path(MODEL).parent).mkdir(parents=True)
    (folder / "home" / MODEL).symlink_to(smollm2.ensure())
    (folder / "home" / "env").symlink_to(folder / "env")
    variables = {
        **os.environ,
        "PATH": f"{bin_}:{os.environ['PATH']}",
        "LC_ALL": "C",  # of sort
        "PYTHONUTF8": "1",
        "PIP_NO_INDEX": "1",  # what the package needs is there
        "PIP_NO_BUILD_ISOLATION": "0",  # which in pip means: no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    for name in ("PYTHONPATH", discovery.DISABLE, "PYTEST_ADDOPTS", "COLUMNS"):
        variables.pop(name, None)
    return folder / "home", variables


def normal(text, home):
    """Output without what differs by machine or by run: folders, widths of tables, times."""
    text = text.replace(os.path.realpath(home), "/home/ann").replace(str(home), "/home/ann")
    text = re.sub(rf"editable: {re.escape(str(ROOT))}\S*", "/home/ann/site-packages", text)
    text = re.sub(r"[─━┏┳┓┡╇┩└┴┘]+", "─", text)
    text = re.sub(r"[\d.]+ times a step", "# times a step", text)
    text = re.sub(r"passed in [\d.]+s", "passed in #s", text)
    text = re.sub(r"[\d.]+ tokens/s", "# tokens/s", text)
    text = re.sub(r"(peak memory *│) [\d.,]+ MB", r"\1 # MB", text)
    # Rounding may turn a greedy text sooner or later.
    text = re.sub(r"^(The sea is a vast .{4}).*", r"\1", text)
    lines = [re.sub(r" +", " ", line).strip() for line in text.strip("\n").splitlines()]
    # Of ours the reader has installed TOVA alone.
    others = tuple(f"│ {name} │" for name in POLICIES if name != "tova")
    return [line for line in lines if not line.startswith(others)]


def sessions(text):
    """The commands of a console block, each with its output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def patched(source, diff):
    """A file's text with a block of ``-`` lines replaced by one of ``+`` lines."""
    old, new = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in marks)
        for marks in ("- ", "+ ")
    )
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.mark.smollm2
def test_tutorial(bench):
    """Every command gives the output that stands below it."""
    home, variables = bench
    folder = home
    for language, more, text in FENCE.findall(read("tutorial.md")):
        title = re.search(r'title="(.*?)"', more)
        if language == "console":
            for command, expected in sessions(text):
                if command.startswith("cd "):
                    folder = folder / command.removeprefix("cd ")
                    continue
                # The model that the guide names stands in the home folder.
                line = command.replace(f"--model {MODEL}", f"--model {home / MODEL}")
                done = subprocess.run(
                    line,
                    shell=True,
                    cwd=folder,
                    env=variables,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                assert normal(done.stdout, home) == normal(expected, home), command
        elif title:
            path = folder / title[1]
            assert path.exists()
            path.write_text(text if language == "python" else patched(path.read_text(), text))
        elif language == "toml":
            assert text in (folder / "pyproject.toml").read_text()
        elif language == "markdown":  # a piece of an example's README, with its lines joined
            readme = (ROOT / "examples/velox-l2norm/README.md").read_text(encoding="utf-8")
            for line in text.strip().splitlines():
                assert line in readme
        else:
            assert language == "sh"  # test_commands_have_these_options looks at it


# Tables


def test_every_public_name_is_in_the_reference():
    text = "".join(read(page) for page in PAGES if page.startswith("reference"))
    for name in velox_core.__all__:
        assert name in text or name == "HOOK_VERSION", name


def test_attributes_of_rows():
    listed = [names_in(row[0])[0] for row in rows_of(read("reference/rows.md"), "attribute")]
    assert listed == [field.name for field in attrs.fields(velox_core.Rows)]
    members = {name for name, _ in inspect.getmembers(velox_core.Rows) if not name.startswith("_")}
    for name in members - set(listed):
        assert f"        - {name}\n" in read("reference/rows.md")


def test_attributes_of_caches():
    rows = rows_of(read("reference/python.md"), "attribute")
    listed = {name.removesuffix("()") for row in rows for name in names_in(row[0])}
    cache = velox_core.VeloxCache(velox_core.load_policy("tova"), 8)
    for name in listed:
        assert hasattr(cache, name)


def test_errors():
    drawn = re.findall(
        r"\w+Error", "".join(text for *_, text in blocks("reference/python.md", "text"))
    )
    errors = {name for name in velox_core.__all__ if name.endswith("Error")}
    assert errors <= set(drawn)
    assert set(drawn) - errors == {"LookupError", "ValueError"}


def test_hooks():
    listed = [names_in(row[0])[0] for row in rows_of(read("reference/hooks.md"), "hook")]
    for call in listed:
        hook = getattr(velox_core.EvictionPolicy, call.partition("(")[0])
        names = [name for name in inspect.signature(hook).parameters if name != "self"]
        assert call == f"{hook.__name__}({', '.join(names)})"


def test_checks():
    listed = [
        (names_in(row[0])[0], row[1]) for row in rows_of(read("reference/testing.md"), "check")
    ]
    assert listed == [(check.name, check.expected) for check in testing.CHECKS]


@pytest.mark.parametrize("name", POLICIES)
def test_options(name):
    """A policy's table has its options with their defaults."""
    policy = velox_core.load_policy(name)
    listed = {}
    for row in rows_of(read(f"policies/{name}.md"), "option"):
        listed |= dict.fromkeys(names_in(row[0]), row[1].strip("`"))
    assert set(listed) == set(policy.options())
    for option, default in policy.options().items():
        if listed[option]:
            assert listed[option].strip('"') == str(default)


def test_figures():
    """They are those of the README, where the command is that gives them."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = read("policies/index.md")
    assert "make compare" in readme
    figures = rows_of(index, "policy | 128 rows")
    assert figures
    for row in figures:
        assert f"| {' | '.join(row)} |" in readme
    full = re.search(r"full cache: ([\d.]+)", readme)[1]
    assert f"full cache has {full}" in index
    known = {cell for row in figures for cell in row[1:]} | {full}
    for name in POLICIES:
        said = re.search(r"^\*\*Figures\*\*(.*?)\n\n", read(f"policies/{name}.md"), re.M | re.S)[1]
        assert set(re.findall(r"\d+\.\d+", said)) <= known


def test_models():
    """Those refused by name, with the reason; and those with limits, as the code lists them."""
    page = read("mlx-lm.md")
    said = {
        name: why for row in rows_of(page, "model") for name in names_in(row[0]) for why in row[1:]
    }
    for name, why in model.REFUSED.items():
        assert said[name] == why
    limits = {name for row in rows_of(page, "models") for name in names_in(row[0])}
    named = {*model.LATENT, *model.ONE_MASK, *model.WHOLE_BLOCKS, "plamo"}
    assert limits <= named
    assert {name for name in model.WHOLE_BLOCKS if not name.endswith("_text")} <= limits


def test_what_environment_variables_and_groups_are_called():
    page = read("reference/plugins.md")
    for name in (discovery.DISABLE, discovery.GROUP, discovery.PROTECTORS):
        assert f"`{name}`" in page


def test_versions():
    assert f"now {velox_core.HOOK_VERSION}." in read("upgrading.md")
    assert f"### {'.'.join(velox_core.__version__.split('.')[:2])}\n" in read("upgrading.md")


# The site


@pytest.mark.parametrize("page", [*PAGES, "../mkdocs.yml"])
def test_nothing_that_only_we_have(page):
    text = read(page)
    assert not re.search(r"design\.md|(?<![\w.])/(work|root|tmp|opt)/", text)
    hosts = set(re.findall(r"https?://([^/\s)\"]+)", text))
    assert hosts <= {"github.com", "arxiv.org", "pluggy.readthedocs.io"}


def test_every_page_is_in_the_menu():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == PAGES
