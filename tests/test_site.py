"""The site: built from docs/ without a warning, whole in itself, and readable on a phone and on a screen."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings_handlers.python")

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent
Browser = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["Browser"]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", folder]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # what tries the network fails
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_and_the_api_are_there(site):
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages <= {page.stem for page in site.glob("*.html")}
    api = (site / "api.html").read_text("utf-8")
    for name in ("generate", "TIDEConfig", "calibrate", "certify", "RouterFile", "ExitPolicy", "create_app"):
        assert re.search(rf'id="TIDE[\w.]*\.{name}"', api), name
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert any("self-speculative" in entry["text"] for entry in index["docs"])


def test_tables_are_tables(site):
    """Python-Markdown wants a blank line before them, which GitHub does not."""
    for page in site.glob("*.html"):
        assert not re.search(r"<p>[^<]*\|\s*-{3}", page.read_text("utf-8")) and "|---|" not in page.read_text("utf-8"), (
            page.name
        )


def test_nothing_is_loaded_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|source|iframe)[^>]*(?:src|href|srcset)=[\"']?(https?://[^\"' >]+)", page.read_text("utf-8")
        )
        assert loaded == [], page.name


def test_links_inside_the_site_lead_somewhere(site):
    for page in site.rglob("*.html"):
        if page.name != "404.html":  # its links are absolute
            for target in re.findall(r'<(?:a|img|link|script)[^>]*(?:href|src)="([^"#?:]+)[#"]', page.read_text("utf-8")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_a_broken_link_stops_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# One\n\n[two](two.md) [three](#three)\n")
    ours = re.search(r"^validation:\n(?:  .+\n)+", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\n{ours}")
    done = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    assert "two.md" in done.stderr and "#three" in done.stderr


@pytest.fixture(scope="module")
def served(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(Browser.missing() is not None, reason=str(Browser.missing()))
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1280, False), (390, True)])
def test_pages_fit_a_phone_and_a_screen(served, width, dark):
    browser = Browser()
    try:
        for page in ("index", "benchmarks", "how_it_works", "api", "troubleshooting"):
            browser.open_url(f"{served}/{page}.html", width, 844, dark=dark)
            run = browser.driver.execute_script
            assert run("return document.documentElement.scrollWidth") <= width, page
            broken = run("return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)")
            assert broken == [], page
            loaded = run("return performance.getEntriesByType('resource').map(entry => entry.name)")
            assert [name for name in loaded if not name.startswith((served, "data:"))] == []
            assert run("return document.body.getAttribute('data-md-color-scheme')") == ("slate" if dark else "default")
    finally:
        browser.close()


@pytest.mark.skipif(Browser.missing() is not None, reason=str(Browser.missing()))
def test_search_finds_a_page(served):
    browser = Browser()
    try:
        browser.open_url(f"{served}/index.html?q=certificate", 1280, 844)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = browser.driver.execute_script(
                "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
            )
            if found:
                break
            time.sleep(0.2)
        assert any("certification.html" in link for link in found)
    finally:
        browser.close()
