"""Each distribution, built and installed as a user gets it: in an environment with nothing else.

Needs the package index, for what the distributions depend on.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(
    path.parent
    for where in ("plugins", "examples")
    for path in ROOT.glob(f"{where}/*/pyproject.toml")
)

pytestmark = [pytest.mark.wheels, pytest.mark.timeout(900)]

ALONE = """
import velox_core

assert velox_core.installed_policies() == [], velox_core.installed_policies()
try:
    velox_core.load_policy("tova")
except velox_core.UnknownPolicyError as error:
    print(error)
"""

# A whole model, bounded: a prompt in blocks, then token by token.
STREAM = """
import importlib, json, sys
import mlx.core as mx
import velox_core
from mlx_lm.models import llama

name, module = sys.argv[1:]
policy = velox_core.load_policy(name, budget=64)
args = llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=128,
)
model = llama.Model(args)
cache = velox_core.make_cache(model, policy)
tokens = mx.random.randint(0, 128, (1, 120))
for block in mx.split(tokens[:, :100], [80, 90], axis=1) + mx.split(tokens[:, 100:], 20, axis=1):
    mx.eval(model(block, cache=cache))
print(json.dumps({
    "policies": [(p.name, p.distribution, p.status) for p in velox_core.installed_policies()],
    "files": [velox_core.__file__, importlib.import_module(module).__file__],
    "offsets": [layer.offset for layer in cache],
    "kept": [layer.positions.shape[-1] for layer in cache],
    "newest": [layer.positions.max().item() for layer in cache],
}))
"""


def run(*command, **more):
    """What the command prints; all that it says, if it fails."""
    hidden = ("PYTHON", "VELOX", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, **more
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheel of each distribution, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, *PLUGINS):
        build = ["-m", "build", "--wheel", "--no-isolation", "--outdir"]
        run(sys.executable, *build, folder, source)
    found = {path.name.split("-")[0].replace("_", "-"): path for path in folder.iterdir()}
    assert set(found) == {"velox-kv", *(plugin.name for plugin in PLUGINS)}
    return found


def test_what_is_in_them(wheels):
    """The package and nothing beside it: no tests, no tools, no other package."""
    sources = {"velox-kv": ROOT, **{plugin.name: plugin for plugin in PLUGINS}}
    for name, wheel in wheels.items():
        package = "velox_core" if name == "velox-kv" else name.replace("-", "_")
        files = zipfile.ZipFile(wheel).namelist()
        assert f"{package}/py.typed" in files
        tops = {file.partition("/")[0] for file in files}
        assert len(tops) == 2
        assert package in tops
        (info,) = tops - {package}
        assert info.endswith(".dist-info")
        assert any(file.endswith("licenses/LICENSE") for file in files)
        assert not any("__pycache__" in file for file in files)
        source = sources[name]
        for path in source.glob(f"{package}/**/*"):  # templates too
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(source).as_posix() in files


@pytest.fixture(scope="module")
def core(wheels, tmp_path_factory):
    """An environment with the core alone, and what it depends on."""
    env = tmp_path_factory.mktemp("core") / "env"
    venv.create(env, with_pip=True)
    # Compiling every module of the dependencies would take longer than all the rest.
    install(env, "--no-compile", wheels["velox-kv"])
    return env


def install(env, *what):
    run(python_of(env), "-m", "pip", "install", "--quiet", *what, cwd=env.parent)


def python_of(env):
    return env / ("Scripts" if os.name == "nt" else "bin") / "python"


def hard_link(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def test_the_core_alone(core):
    said = run(python_of(core), "-I", "-c", ALONE, cwd=core.parent)
    assert "no policy 'tova' is installed for" in said
    assert "Installed: none." in said
    run(python_of(core), "-m", "pip", "check", cwd=core.parent)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_alone(wheels, core, plugin, tmp_path):
    """In an environment with the core and this plugin: a copy of the core's own, in which the core
    is installed anew, for scripts hold their environment's path."""
    env, core_wheel = tmp_path / "env", wheels["velox-kv"]
    shutil.copytree(core, env, symlinks=True, copy_function=hard_link)
    install(env, "--force-reinstall", "--no-deps", core_wheel, wheels[plugin.name])
    run(python_of(env), "-m", "pip", "check", cwd=tmp_path)

    name, module = plugin.name.removeprefix("velox-"), plugin.name.replace("-", "_")
    seen = json.loads(run(python_of(env), "-I", "-c", STREAM, name, module, cwd=tmp_path))
    assert seen["policies"] == [[name, plugin.name, "ok"]]
    for file in seen["files"]:
        assert env.resolve() in Path(file).resolve().parents
    assert seen["offsets"] == [120, 120]
    assert seen["kept"] == [64, 64]
    assert seen["newest"] == [119, 119]

    velox = python_of(env).with_name("velox")
    (row,) = json.loads(run(velox, "policies", "--json", cwd=tmp_path))
    assert (row["name"], row["distribution"], row["status"]) == (name, plugin.name, "ok")
