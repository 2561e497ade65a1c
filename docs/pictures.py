"""Makes the pictures of docs/pictures, from what TIDE does on this machine: python docs/pictures.py

    demo.svg                             the terminal after `tide demo`
    report-light.png, report-dark.png    the report it wrote, in a browser, with the mouse on a token
    depths.png                           depth by token over a text, for the README
    chat-wide.png, chat-phone.png        the page of `tide serve`, exits on and off, on a screen and on a phone

Needs the extras plots and dev, and Debian's chromium and chromium-driver. Speeds are as measured: a busy
machine shows in the pictures.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 104  # characters of the terminal


class Browser:
    """Chromium without a window, `scale` dots to a CSS pixel."""

    def __init__(self, scale: float = 1.0) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = _chromium() or ""
        for argument in ("--headless=new", "--hide-scrollbars", f"--force-device-scale-factor={scale}"):
            options.add_argument(argument)
        options.add_argument("--no-sandbox")  # which root does not get, and the pages are our own
        self.driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))

    @staticmethod
    def missing() -> str | None:
        """What has to be installed first."""
        if importlib.util.find_spec("selenium") is None:
            return "selenium is not installed: pip install '.[dev]'"
        if _chromium() is None or shutil.which("chromedriver") is None:
            return "there is no Chromium with its driver: apt-get install chromium chromium-driver"
        return None

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Open a file in a window of `width` by `height` CSS pixels."""
        self.open_url(page.absolute().as_uri(), width, height, dark=dark)

    def open_url(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        """Open a page in a window of `width` by `height` CSS pixels."""
        metrics = dict(width=width, height=height, deviceScaleFactor=0, mobile=False)
        scheme = dict(name="prefers-color-scheme", value="dark" if dark else "light")
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[scheme]))
        self.driver.get(url)

    def hover(self, selector: str) -> None:
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.by import By

        ActionChains(self.driver, duration=0).move_to_element(self.driver.find_element(By.CSS_SELECTOR, selector)).perform()

    def picture(self, path: Path) -> None:
        """What is in the window, in at most 256 colours, which is all our pages have and a third of the size."""
        from PIL import Image

        seen = Image.open(io.BytesIO(self.driver.get_screenshot_as_png()))
        seen.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)

    def close(self) -> None:
        self.driver.quit()


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def terminal(text: str, path: Path) -> None:
    """What a command printed, as a picture of a terminal that needs no font from elsewhere."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(text))
    drawn = console.export_svg(title="tide demo", theme=DIMMED_MONOKAI)  # dark enough for the darkest of our colours
    drawn = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", drawn, flags=re.DOTALL)
    path.write_text(drawn.replace("font-family: Fira Code", "font-family: ui-monospace"), encoding="utf-8")


def report(page: Path) -> None:
    browser = Browser(1.5)
    for name, dark in (("light", False), ("dark", True)):
        browser.open(page, 900, 760, dark=dark)  # wide enough for the panel to stand beside the answer
        browser.hover('.token:nth-child(n + 18):not([data-tip*="none ("])')  # in the middle, and it exited early
        browser.picture(PICTURES / f"report-{name}.png")
    browser.close()


def depths(path: Path) -> None:
    """The demo's prompt once more: the quickest run of a few, when the machine was least busy."""
    import TIDE
    from TIDE.cli.demo import PROMPT
    from TIDE.plots.runs import plot_depths

    model, tokenizer = TIDE.load_model("default")
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        runs = [TIDE.record(engine, tokenizer, PROMPT, max_new_tokens=64, do_sample=False) for _ in range(5)]
    plot_depths(max(runs, key=lambda run: run.tokens_per_second), path)


def chat() -> None:
    """The page of a server: one question, with exits and without."""
    command = [Path(sys.executable).with_name("tide"), "serve", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        wide, phone = ("wide", 1280, 720, False), ("phone", 390, 780, True)
        for name, width, height, dark in (wide, wide, phone):  # first answers of a server are slower than all others
            browser = Browser(1.5)
            browser.open_url(url, width, height, dark=dark)
            browser.driver.execute_script(
                "document.getElementById('both').click(); document.getElementById('tokens').value = 64"
            )
            browser.driver.find_element("id", "prompt").send_keys("Why is the sky blue?\n")
            while not browser.driver.find_elements("css selector", ".compared"):
                time.sleep(0.2)
            browser.driver.execute_script("document.querySelector('main').scrollTop = 0")
            browser.picture(PICTURES / f"chat-{name}.png")
            browser.close()
        process.terminate()


def main() -> None:
    if missing := Browser.missing():
        raise SystemExit(missing)
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, FORCE_COLOR="1", COLUMNS=str(WIDTH))
        command = [Path(sys.executable).with_name("tide"), "demo"]
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        terminal(f"$ tide demo\n{done.stdout}", PICTURES / "demo.svg")
        report(Path(folder) / "tide-demo.html")
    depths(PICTURES / "depths.png")
    chat()


if __name__ == "__main__":
    main()
