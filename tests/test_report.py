"""`velox report`: a page that holds all there is, asks nobody for anything, and reads in a real
browser."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from velox_core import VeloxError
from velox_core.cli import main
from velox_core.evaluation import results
from velox_core.evaluation.plots import DISPLAYS
from velox_core.evaluation.plots.figure import INK
from velox_core.evaluation.report import page
from velox_core.evaluation.results import Results

HOSTILE = "</style><script>document.title='taken'</script>&lt;b&gt;$x^$"
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROME = next(filter(None, map(shutil.which, (*NAMES, MAC))), None)


def perplexities(model="me/mine", policy="tova", budgets=(64, 128, 256)):
    base = {"kind": "perplexity", "model": model, "velox": "0.1.0", "text": "a.txt"}
    base |= {"digest": "x", "tokens": 4096, "block": 64, "first_scored": 1, "options": {}}
    full = {**base, "policy": "full", "budget": None, "perplexity": 10.94}
    return [
        full,
        *({**base, "policy": policy, "budget": n, "perplexity": 11 + 99 / n} for n in budgets),
    ]


def passkeys(policy="tova"):
    base = {"kind": "passkey", "model": "me/mine", "velox": "0.1.0", "filler": "sentences"}
    return [
        {
            **base,
            "digest": "y",
            "block": 64,
            "policy": name,
            "options": {},
            "budget": budget,
            "length": length,
            "depth": depth,
            "trial": 0,
            "found": True,
            "probability": 0.75,
        }
        for name, budget in (("full", None), (policy, 64))
        for length in (512, 1024)
        for depth in (0, 100)
    ]


class Parsed(HTMLParser):
    """The elements of a page, each with its attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def test_every_kind_can_be_shown():
    assert set(DISPLAYS) == set(results.KINDS)


def test_what_is_on_the_page():
    text = page([*passkeys(), *perplexities(), *perplexities("you/yours", budgets=(64,))])
    parsed = Parsed(text)
    assert [each["id"] for each in parsed.all("section")] == ["perplexity", "passkey"]
    assert [each["href"] for each in parsed.all("a")] == ["#perplexity", "#passkey"]
    assert len(parsed.all("article")) == len(parsed.all("table")) == len(parsed.all("svg")) == 3
    for shown in ("me/mine, you/yours", "14 results", "4,096", "12.55 (+1.61)", "100% (0.75)"):
        assert shown in parsed.text
    assert text.count(DISPLAYS["perplexity"].about.partition(":")[0]) == 1  # once a kind
    ids = [each["id"] for _, each in parsed.found if "id" in each]
    assert len(ids) == len(set(ids))
    named = {name for _, each in parsed.found for name in re.findall(r"#([\w-]+)", str(each))}
    assert {name for name in named if not re.fullmatch("[0-9a-f]{6}", name)} <= set(ids)


def test_it_asks_no_host():
    text = page([*passkeys(), *perplexities()])
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert "//" not in without_namespaces
    assert "default-src 'none'" in text
    parsed = Parsed(text)
    for tag in ("script", "link", "img", "iframe", "object"):
        assert not parsed.all(tag)


def test_plots_have_the_colour_of_the_page():
    text = page(perplexities())
    assert INK not in text
    assert "currentColor" in text
    assert "prefers-color-scheme: dark" in text


def test_what_is_in_the_results_is_text():
    text = page([*perplexities(HOSTILE, HOSTILE), *passkeys(HOSTILE)])
    assert "<script" not in text
    parsed = Parsed(text)
    assert not parsed.all("script")
    assert HOSTILE in parsed.text
    assert parsed.text.count(HOSTILE) >= 5  # heading, settings, both tables and the plots


def test_lists_of_equals_are_shortened():
    from velox_core.evaluation.report import _shown

    assert _shown([1024] * 30) == "1,024 each"
    assert _shown([0, 15, 29]) == "0, 15, 29"
    assert _shown("a") == "a"


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_without_what_it_needs(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(VeloxError, match=rf"need {module}.*pip install 'velox-kv\[eval\]'"):
        page(perplexities())


# The command


def report(*args):
    return CliRunner().invoke(main, ["report", *map(str, args)])


@pytest.fixture
def files(tmp_path):
    made = []
    for name, records in (("a.jsonl", perplexities()), ("b.jsonl", passkeys())):
        made.append(tmp_path / name)
        for record in records:
            Results(made[-1]).append(record)
    return made


def test_files(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = report(*files)
    assert (result.exit_code, result.stdout) == (0, "report.html\n")
    text = Path("report.html").read_text(encoding="utf-8")
    assert len(Parsed(text).all("section")) == 2
    assert report(*files, "--out", "other.html").exit_code == 0
    assert Path("other.html").read_text(encoding="utf-8") == text  # the same from the same
    assert len(list(tmp_path.iterdir())) == 4


def test_bad_input(files, tmp_path):
    def fails(*args):
        result = report(*args)
        assert result.exit_code == 2
        return result.stderr

    assert "Missing argument" in fails()
    assert "does not exist" in fails(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert "no results to report" in fails(tmp_path / "empty.jsonl")
    (tmp_path / "wrong.jsonl").write_text("[]\n")
    assert "line 1 of " in fails(files[0], tmp_path / "wrong.jsonl")
    assert "no folder" in fails(files[0], "--out", tmp_path / "none" / "report.html")


# In a browser

#: Shows the page as wide as a phone, and writes what it finds into its own document.
PHONE = """<!doctype html><iframe width="360" height="700" srcdoc="{page}"></iframe><pre></pre>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument;
  const boxes = [...page.querySelectorAll(".scroll")];
  document.querySelector("pre").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth,
    scripts: page.scripts.length,
    title: page.title,
    text: page.querySelector("h1").textContent,
    scrolls: boxes.some(box => box.scrollWidth > box.clientWidth),
    plots: [...page.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().height > 100),
    ground: getComputedStyle(page.body).backgroundColor,
    ink: getComputedStyle(page.querySelector("svg text")).fill,
  }});
}};
</script>"""


@pytest.mark.skipif(not CHROME, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser(tmp_path, dark):
    """On a phone only tables and plots scroll sideways, all of them are there, what the results
    hold is text, and letters stand out from the ground."""
    wide = (64, *range(100, 1000, 100))
    text = page([*perplexities(HOSTILE, HOSTILE, wide), *passkeys()])
    (tmp_path / "phone.html").write_text(PHONE.format(page=html.escape(text)), encoding="utf-8")
    command = [CHROME, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=800,900"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    # A BLAS that is preloaded for MLX keeps Chromium from starting.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    command.append((tmp_path / "phone.html").as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    found = re.search(r"<pre>(.+)</pre>", done.stdout, re.DOTALL)
    assert found, f"the browser says nothing: {done.stderr}"
    seen = json.loads(html.unescape(found[1]))
    assert seen["width"] <= 360
    assert seen["scrolls"]
    assert seen["scripts"] == 0
    assert seen["title"].startswith("velox: results of ")
    assert HOSTILE in seen["text"]
    assert seen["plots"] == [True, True]

    def light(colour):
        return sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128

    assert light(seen["ground"]) == (not dark)
    assert light(seen["ink"]) == dark
