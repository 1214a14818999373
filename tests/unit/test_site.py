"""The site (make docs) has every document, no broken link, and nothing that a browser would load from elsewhere."""

import importlib.util
import json
import subprocess
import tomllib

import pytest
from helpers import ROOT

BUILDER = ROOT / "build" / "docs" / "env" / "bin" / "python"


def load_script():
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "scripts" / "build_site.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


script = load_script()


def pages_of(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in pages_of(part)]


def test_every_document_is_in_the_navigation_once():
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    documents = [str(document.relative_to(ROOT)) for document in script.documents()]
    assert len(documents) >= 50
    assert sorted(pages_of(config["project"]["nav"])) == sorted(documents)


def test_links_to_code_lead_to_pages(tmp_path):
    script.copy_pages(tmp_path)
    text = (tmp_path / "docs" / "porting-a-model.md").read_text(encoding="utf-8")
    assert "(../zerofit/model/families.py.md)" in text
    page = (tmp_path / "zerofit" / "model" / "families.py.md").read_text(encoding="utf-8")
    assert (ROOT / "zerofit" / "model" / "families.py").read_text(encoding="utf-8").rstrip() in page
    assert "`full|selective`" in (tmp_path / "docs" / "options.md").read_text(encoding="utf-8")


def test_what_is_wrong_with_a_site_is_found(tmp_path):
    (tmp_path / "good.html").write_text('<h1 id="top"><a href="#top">a</a><a href="https://example.org">b</a>')
    assert not script.problems(tmp_path)
    (tmp_path / "links.html").write_text('<a href="none.html">a</a><a href="good.html#none">b</a>')
    assert len(script.problems(tmp_path)) == 2
    (tmp_path / "loads.html").write_text('<script src="https://b.org/a.js"></script><img src="//b.org/c.png">')
    assert len(script.problems(tmp_path)) == 4
    (tmp_path / "loads.css").write_text("@import url(https://example.org/font.css)")
    assert len(script.problems(tmp_path)) >= 5


@pytest.mark.skipif(not BUILDER.exists(), reason="make docs installs the builder")
def test_the_site_is_whole():
    subprocess.run([BUILDER, ROOT / "scripts" / "build_site.py"], cwd=ROOT, check=True)
    index = json.loads((ROOT / "site" / "search.json").read_text(encoding="utf-8"))
    texts = " ".join(item["title"] + item["text"] for item in index["items"])
    assert len(index["items"]) >= 300
    assert all(word in texts for word in ("learning_rate", "micro-batch", "継続事前学習", "オプティマイザ"))
