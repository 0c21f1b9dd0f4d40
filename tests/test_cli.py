"""The command `velox`: what it prints, and every bad input as one line with exit code 2."""

import json
import os
import subprocess
import sys
from importlib import metadata

import fake_plugins
import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner
from fake_plugins import GOOD, install, spoil

from velox_core import UnsupportedModelError
from velox_core.cli import main
from velox_core.cli.doctor import blas, compiler
from velox_core.cli.generate import read_prompt
from velox_core.cli.loading import parse_options

see, site = fake_plugins.see, fake_plugins.site  # fixtures

PROMPT = "To be, or not to be: that is the question."


@pytest.fixture
def ay(site):
    """The policy "ay", and no other."""
    install(site, "velox-a", "ay")


def velox(*args, **kwargs):
    return CliRunner().invoke(main, args, **kwargs)


def generate(folder, *args, **kwargs):
    defaults = ("generate", "--model", folder, "--policy", "ay", "--budget", "16", "-m", "8")
    result = velox(*defaults, *args, **kwargs)
    assert result.exit_code == 0, result.output
    return result


def plain(folder, prompt, **kwargs):
    """What mlx-lm itself makes of the prompt, with the whole cache."""
    model, tokenizer = mlx_lm.load(folder)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=8, **kwargs)


def fails(*args, **kwargs):
    """The line with which the command fails."""
    result = velox(*args, **kwargs)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("velox: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("velox: ").rstrip("\n")


# Generating


def test_text_on_stdout_and_table_on_stderr(folder, ay):
    result = generate(folder, "--budget", "512", "--prompt", PROMPT)
    assert result.stdout == plain(folder, PROMPT) + "\n"
    assert "tokens seen" in result.stderr
    assert "rows kept" in result.stderr
    assert "against" not in result.stderr  # nothing was evicted
    less = generate(folder, "--budget", "32", "--prompt", PROMPT)
    assert "without eviction (" in less.stderr
    assert "peak memory" in result.stderr
    assert f"{len(PROMPT)} tokens, " in result.stderr


def test_json(folder, ay):
    result = generate(folder, "--json", "--option", "window=3", "--prompt", PROMPT)
    assert result.stderr == ""
    data = json.loads(result.stdout)
    assert len(data["text"]) == 8
    assert data["policy"] == "ay"
    assert data["options"]["budget"] == 16
    assert data["options"]["window"] == 3
    assert data["prompt_tokens"] == len(PROMPT)
    assert data["generation_tokens"] == 8
    assert data["finish_reason"] == "length"
    # mlx-lm computes one token ahead, so the last one may have been seen or not.
    assert data["tokens_seen"] in (len(PROMPT) + 7, len(PROMPT) + 8)
    assert data["rows_kept"] == [16, 16]
    # Two layers of keys and values, two KV heads of 16 float32 each; room for 256 rows at once.
    assert data["full_bytes"] == 256 * 2 * 2 * 2 * 16 * 4
    assert 0 < data["kept_bytes"] < data["full_bytes"]
    assert data["compression_ratio"] == pytest.approx(data["full_bytes"] / data["kept_bytes"])
    assert data["prompt_tps"] > 0
    assert data["generation_tps"] > 0
    assert data["peak_memory"] > data["kept_bytes"]


def test_where_the_prompt_may_come_from(folder, ay, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8-sig")
    assert read_prompt(None, str(file), None) == PROMPT  # the mark at its beginning isn't text
    expected = generate(folder, "--prompt", PROMPT).stdout
    assert generate(folder, "--prompt-file", str(file)).stdout == expected
    assert generate(folder, "--prompt-file", "-", input=PROMPT).stdout == expected
    assert generate(folder, "-", input=PROMPT).stdout == expected
    assert generate(folder, "-", input=PROMPT + "\n").stdout == expected  # as `echo` has it
    assert generate(folder, "-", input=PROMPT + "\r\n").stdout == expected
    assert generate(folder, "-", input=PROMPT + "\n\n").stdout != expected


def test_chat_template(folder, ay, tmp_path):
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / file).symlink_to(os.path.join(folder, file))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    wide = ("--budget", "512", "--prompt", PROMPT)
    assert generate(str(tmp_path), *wide).stdout == plain(folder, f"[user] {PROMPT}>") + "\n"
    assert generate(str(tmp_path), "--raw", *wide).stdout == plain(folder, PROMPT) + "\n"

    config["chat_template"] = "{{ raise_exception('no such role') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    message = fails("generate", "--model", str(tmp_path), "--policy", "ay", "--prompt", PROMPT)
    assert message == "the model's chat template fails: no such role; --raw goes without it"


def test_progress_bar_on_a_terminal(folder, ay, monkeypatch):
    quiet = generate(folder, "--prompt", PROMPT)
    assert f"/{len(PROMPT)}" not in quiet.stderr
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes its output for a terminal
    result = generate(folder, "--prefill-step-size", "40", "--prompt", PROMPT)
    assert f"{len(PROMPT)}/{len(PROMPT)}" in result.stderr
    assert result.stdout == generate(folder, "--prefill-step-size", "40", "--prompt", PROMPT).stdout
    assert "\x1b" not in result.stdout  # no trace of the bar in the text
    assert len(result.stdout) == 8 + 1
    assert "tokens seen" in result.stderr
    # The bar is gone before the text begins, and doesn't come back.
    assert "\x1b[2K" not in result.output.partition(result.stdout.rstrip("\n"))[2]


def test_seed(folder, ay):
    args = ("--temp", "2", "--prompt", PROMPT, "--seed")
    assert generate(folder, *args, "1").stdout == generate(folder, *args, "1").stdout
    assert generate(folder, *args, "1").stdout != generate(folder, *args, "2").stdout


def test_prefill_step_size(folder, ay, monkeypatch):
    given = {}
    stream = mlx_lm.stream_generate

    def spy(*args, **kwargs):
        given.update(kwargs)
        return stream(*args, **kwargs)

    monkeypatch.setattr(mlx_lm, "stream_generate", spy)
    generate(folder, "--prefill-step-size", "7", "--prompt", PROMPT)
    assert given["prefill_step_size"] == 7
    assert given["max_tokens"] == 8


def test_options():
    options = ("a=1", "b=1.5", "c=true", "d=False", "e=[1, 2]", "f=head", "g=a=b")
    assert parse_options(options, 4) == {
        "a": 1,
        "b": 1.5,
        "c": True,
        "d": False,
        "e": [1, 2],
        "f": "head",
        "g": "a=b",
        "budget": 4,
    }


# Bad input to `velox generate`, all of it seen before a model is loaded

WANTED = ("--policy", "ay", "--prompt", "x")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "ay", "--prompt", ""), "the prompt is empty"),
        (("--policy", "ay", "--prompt", " \n"), "the prompt is empty"),
        (("--policy", "ay"), "give one prompt: --prompt TEXT, --prompt-file FILE, or -"),
        ((*WANTED, "-"), "give one prompt: "),
        ((*WANTED, "a b"), "give the prompt as --prompt 'a b'"),
        ((*WANTED, "--prompt-file", "x"), "give one prompt: "),
        (("--policy", "ay", "--prompt-file", "no/such"), "prompt from no/such: No such file or "),
        (("--policy", "ay", "--prompt-file", "."), "prompt from .: Is a directory"),
        (("--policy", "ay", "--prompt-file", "a\0b"), "can't read the prompt from "),
        (("--prompt", "x"), "Missing option '--policy'"),
        (("--policy", "ai", "--prompt", "x"), "no policy 'ai' is installed"),
        ((*WANTED, "--budget", "0"), "budget=0 isn't allowed"),
        ((*WANTED, "--budget", "-3"), "budget=-3 isn't allowed"),
        ((*WANTED, "--budget", "4"), "budget=4 leaves no room"),
        ((*WANTED, "--budget", "x"), "Invalid value for '--budget'"),
        ((*WANTED, "--option", "bugdet=3"), "has no option 'bugdet'. Did you mean 'budget'?"),
        ((*WANTED, "--option", "name=3"), "has no option 'name'."),
        ((*WANTED, "--option", "protect=3"), "'protect' can't be given as an --option"),
        ((*WANTED, "--option", "scope=heads"), "scope='heads' isn't allowed"),
        ((*WANTED, "--option", "window"), "--option 'window' must be key=value"),
        ((*WANTED, "--option", "=3"), "--option '=3' must be key=value"),
        ((*WANTED, "--budget", "8", "-o", "budget=8"), "give the budget once"),
        ((*WANTED, "--max-tokens", "0"), "Invalid value for '--max-tokens'"),
        ((*WANTED, "--temp", "-1"), "Invalid value for '--temp'"),
        ((*WANTED, "--prefill-step-size", "0"), "Invalid value for '--prefill-step-size'"),
        ((*WANTED, "--bugdet", "8"), "No such option '--bugdet'"),
    ],
)
def test_bad_input(ay, monkeypatch, args, said):
    def load(*args, **kwargs):
        raise AssertionError("the model is loaded first")

    monkeypatch.setattr(mlx_lm, "load", load)
    assert said in fails("generate", "--model", "x", *args)


def test_prompt_that_is_not_utf8(ay, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    args = ("generate", "--model", "x", "--policy", "ay", "--prompt-file")
    assert "latin isn't UTF-8 text" in fails(*args, str(tmp_path / "latin"))
    assert "standard input isn't UTF-8 text" in fails(*args, "-", input=b"caf\xe9")
    assert fails(*args, "-", input="") == "the prompt is empty"


def test_models_that_cannot_be_loaded(ay, tmp_path, monkeypatch):
    def message(model):
        return fails("generate", "--model", model, *WANTED)

    assert message("./no/such") == "there is no model folder ./no/such"
    assert message("/no/such") == "there is no model folder /no/such"
    assert message("models/no/such") == "there is no model folder models/no/such"
    assert message(str(tmp_path)).startswith(f"can't load the model '{tmp_path}': FileNotFound")
    (tmp_path / "file").touch()
    assert message(str(tmp_path / "file")).startswith("can't load the model ")
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    (tmp_path / "model.safetensors").touch()
    assert message(str(tmp_path)).startswith(f"can't load the model '{tmp_path}': ")

    def load(*args, **kwargs):
        raise OSError("the hub\n\nis out of reach")

    monkeypatch.setattr(mlx_lm, "load", load)
    assert message("me/mine") == "can't load the model 'me/mine': OSError: the hub is out of reach"


def test_a_model_that_is_refused(folder, ay, monkeypatch):
    def refuse(model, policy):
        raise UnsupportedModelError("not this one,\nand this is why")

    monkeypatch.setattr("velox_core.model.make_cache", refuse)
    message = fails("generate", "--model", folder, *WANTED)
    assert message == "not this one, and this is why"


def test_interrupt(ay, monkeypatch):
    def load(*args, **kwargs):
        raise KeyboardInterrupt

    # mlx-lm's errors become messages; an interrupt mustn't.
    monkeypatch.setattr(mlx_lm, "load", load)
    assert velox("generate", "--model", "x", *WANTED).exit_code == 130


# The other commands


def test_policies(site, ay):
    install(site, "velox-b", "bee", code=None)
    result = velox("policies")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for heading in ("name", "distribution", "version", "origin", "status"):
        assert heading in lines[1]
    assert [word for word in lines[3].split() if word != "│"] == [
        "ay",
        "velox-a",
        "1.0",
        str(site),
        "ok",
    ]
    assert "stale: module 'velox_b' not found" in lines[4]


def test_policies_json(site, ay):
    assert json.loads(velox("policies", "--json").stdout) == [
        {
            "name": "ay",
            "distribution": "velox-a",
            "version": "1.0",
            "target": "velox_a:Fake",
            "origin": str(site),
            "status": "ok",
        }
    ]


def test_no_policies(site):
    assert "No policy is installed." in velox("policies").stdout
    assert json.loads(velox("policies", "--json").stdout) == []


def doctor(code):
    """The report as a dict, name to finding."""
    result = velox("doctor", "--json")
    assert result.exit_code == code, result.output
    return {check["what"]: check for check in json.loads(result.stdout)}


def test_doctor(ay):
    found = doctor(0)
    assert found["Python"]["value"].startswith(sys.version.split()[0])
    assert metadata.version("mlx") in found["MLX"]["value"]
    assert metadata.version("mlx-lm") in found["mlx-lm"]["value"]
    assert found["policy ay"]["status"] == "ok"
    if sys.platform == "linux" and mx.default_device().type == mx.cpu:
        assert found["BLAS"]["status"] in ("ok", "warning")
    result = velox("doctor")
    assert result.exit_code == 0
    assert "policy ay" in result.stdout


def test_doctor_really_loads_each_policy(site, ay, monkeypatch):
    install(site, "velox-b", "ay")
    install(site, "velox-c", "off")
    install(site, "velox-d", "broken", code="print('noise')\n1 / 0")
    install(site, "velox-e", "misspelt", code=spoil("def score", "def scorre"))
    install(site, "velox-f", "noisy", code=GOOD + "\n    print('noise')")
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", "off")
    found = doctor(1)
    assert found["policy off"]["status"] == "disabled"
    assert found["policy noisy"]["status"] == "ok"
    assert found["policy ay"]["status"] == "warning"
    assert "claimed by velox-a and velox-b: choose with velox-b:ay" in found["policy ay"]["mend"]
    assert found["policy broken"]["status"] == "failed"
    assert "ZeroDivisionError" in found["policy broken"]["mend"]
    assert "unknown hook 'scorre'" in found["policy misspelt"]["mend"]
    assert velox("doctor").exit_code == 1


PROTECTOR = """
    import attrs
    from velox_core import Protector, hookimpl

    @attrs.frozen(eq=False)
    class Fake(Protector):
        hook_version = 1
        every: int

        @hookimpl
        def protect(self, rows):
            return rows.positions % self.every == 0
"""


def test_doctor_really_loads_each_protector(site, monkeypatch):
    """Whose options may have no default."""
    mistakes = {
        "good": ("", ""),
        "off": ("", ""),
        "broken": ("    import attrs", "    1 / 0"),
        "misspelt": ("def protect", "def protct"),
        "greedy": ("self, rows", "self, rows, count"),
        "old": ("hook_version = 1", "hook_version = 0"),
        "scoring": ("def protect", "def score"),
        "policy": ("Fake(Protector)", "Fake"),
    }
    for name, (old, new) in mistakes.items():
        code = PROTECTOR.replace(old, new) if old else PROTECTOR
        points = f"[velox.protectors]\n{name} = velox_{name}:Fake\n"
        install(site, f"velox-{name}", entry_points=points, code=code)
    monkeypatch.setenv("VELOX_DISABLE_PLUGINS", "off")
    found = doctor(1)
    status = {name: found[f"protector {name}"]["status"] for name in (*mistakes, "pin")}
    assert status == {
        **dict.fromkeys(mistakes, "failed"), "good": "ok", "off": "disabled", "pin": "ok"
    }  # fmt: skip
    mend = {name: found[f"protector {name}"]["mend"] for name in mistakes}
    assert "ZeroDivisionError" in mend["broken"]
    assert "unknown hook 'protct'" in mend["misspelt"]
    assert "`protect` takes count, which it will never get" in mend["greedy"]
    assert "written for hook version 0" in mend["old"]
    assert "beside a policy there may be no `score`" in mend["scoring"]
    assert "must be a subclass of velox_core.Protector" in mend["policy"]


@pytest.mark.parametrize(
    ("needs", "status", "said"),
    [
        (["mlx-lm>=0.1,<9999", "attrs"], "ok", "(supported: <9999,>=0.1)"),
        (["mlx-lm>=9999"], "failed", "outside >=9999"),
    ],
)
def test_doctor_knows_mlx_lms_range(site, monkeypatch, needs, status, said):
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    found = doctor(status == "failed")["mlx-lm"]
    assert found["status"] == status
    assert said in found["value"]
    assert ("pip install 'mlx-lm>=9999'" in found["mend"]) == (status == "failed")


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 2 /x/mlx_cpu.libs/libblas-bd8a282c.so.3.10.0
7f04-7f05 r-xp 00000000 08:01 3 /x/numpy.libs/libscipy_openblas64_-ff651d7f.so
7f06-7f07 rw-p 00000000 00:00 0
"""


def test_compiler(monkeypatch, tmp_path):
    found = tmp_path / "g++"
    found.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler().status == "ok"
    found.unlink()
    assert (compiler().status, compiler().value) == ("warning", "no g++")
    assert compiler().mend.endswith("apt-get install g++")


def test_blas():
    slow = blas(MAPS)  # NumPy's own OpenBLAS has other symbols, and is no use to MLX
    assert slow.status == "warning"
    assert slow.value == "reference BLAS (libblas-bd8a282c.so.3.10.0)"
    assert "apt-get install libopenblas0-pthread" in slow.mend
    assert "LD_PRELOAD=libopenblas.so.0" in slow.mend
    fast = blas(
        MAPS + "7f08-7f09 r-xp 0 08:01 4 /usr/lib/openblas-pthread/libopenblasp-r0.3.21.so\n"
    )
    assert (fast.status, fast.value, fast.mend) == ("ok", "libopenblasp-r0.3.21.so", "")


# The process


def run(*args, path=""):
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "velox_core.cli", *args]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_as_a_process(tmp_path):
    install(tmp_path, "velox-a", "ay", code="raise SystemExit(0)")
    listed = run("policies", "--json", path=tmp_path)
    assert listed.returncode == 0
    assert "ay" in [policy["name"] for policy in json.loads(listed.stdout)]
    broken = run("generate", "--model", "x", *WANTED, path=tmp_path)
    assert broken.returncode == 2
    assert broken.stdout == ""
    assert broken.stderr.startswith(
        "velox: policy 'ay' (velox-a 1.0) can't be imported: SystemExit"
    )
    assert broken.stderr.count("\n") == 1


def test_help_and_version():
    assert "generate" in velox().stdout
    assert velox().exit_code == 0
    assert "--budget" in velox("generate", "--help").stdout
    assert velox("--version").stdout.startswith("velox, version ")
    assert "No such command 'genrate'" in fails("genrate")
