"""The page in a real browser: a conversation, a stop in the middle, an error, exits on and off, on a phone, light and dark."""

from __future__ import annotations

import re
import runpy
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from TIDE.plots.ramp import RAMP
from TIDE.server import ServerSettings

PICTURES = Path(__file__).parents[2] / "docs" / "pictures.py"
PAGE = Path(__file__).parents[2] / "src" / "TIDE" / "server" / "page.html"
Browser = runpy.run_path(str(PICTURES))["Browser"]
in_browser = pytest.mark.skipif(Browser.missing() is not None, reason=str(Browser.missing()))
OUTSIDE = "return [...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"


def test_the_page_needs_nothing_from_elsewhere_and_has_the_colours_of_the_report():
    text = PAGE.read_text("utf-8")
    assert not re.search(r"https?://|//\w+\.|@import|<script src|<link rel=.stylesheet", text)
    (ramp,) = re.findall(r"const RAMP = (\[.*\]);", text)
    assert tuple(map(tuple, eval(ramp))) == RAMP
    assert text.count("\n") < 400


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def page(browser, server):
    """The page of the server, in a window."""

    def open_(width: int = 1280, height: int = 800, dark: bool = False, url: str = server.url):
        browser.open_url(url, width, height, dark=dark)
        return browser.driver

    return open_


def find(driver, selector: str):
    return driver.find_elements("css selector", selector)


def wait(driver, script: str, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not driver.execute_script(f"return {script}"):
        assert time.monotonic() < until, f"never: {script}"
        time.sleep(0.02)


def say(driver, text: str, **values: object) -> None:
    for name, value in values.items():
        driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", name, str(value))
    driver.find_element("id", "prompt").send_keys(text + "\n")


def is_done(driver, count: int = 1) -> None:
    wait(
        driver,
        f"document.querySelectorAll('.answer[data-done]').length === {count} && !document.getElementById('send').disabled",
    )


@pytest.mark.full
@in_browser
def test_a_conversation_is_streamed_on_the_colours_of_its_depths(page, server):
    driver = page()
    wait(driver, "document.getElementById('model').textContent === 'tiny'")
    say(driver, "Hello", tokens=24)
    is_done(driver)
    tokens = find(driver, ".token")
    assert len(tokens) == 24
    depths = {token.get_attribute("title") for token in tokens}
    assert "after 4 of 4 layers" in depths and len(depths) > 1
    colours = {token.get_attribute("title"): token.value_of_css_property("background-color") for token in tokens}
    assert len(set(colours.values())) == len(depths)
    figures = find(driver, ".figures")[0].text
    assert re.search(r"24 tokens · [\d.]+ tok/s · first after [\d.]+ s · mean depth [\d.]+ of 4 · \d+ of \d+ drafts", figures)
    server.log.lines.clear()
    say(driver, "And then?")
    is_done(driver, 2)
    assert [said.text for said in find(driver, ".said")] == ["Hello", "And then?"]
    asked = server.post("/tokenize", messages=[{"role": "user", "content": "Hello"}]).json()["count"]
    assert f'"prompt_tokens": {asked}' not in server.lines(1)[0], "the second turn has the first before it"
    assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.full
@in_browser
def test_exits_on_and_off_stand_side_by_side_with_the_same_text(page):
    driver = page()
    driver.find_element("id", "both").click()
    say(driver, "Hello", tokens=16)
    wait(driver, "document.querySelector('.compared')")
    on, off = find(driver, ".text")
    assert on.text == off.text != ""
    assert abs(on.rect["y"] - off.rect["y"]) < 2 and on.rect["x"] < off.rect["x"]
    titles = [token.get_attribute("title") for token in off.find_elements("css selector", ".token")]
    assert set(titles) == {"after 4 of 4 layers"}
    assert re.fullmatch(r"the same text, [\d.]+ times as fast with exits", find(driver, ".compared")[0].text)


@pytest.mark.full
@in_browser
def test_a_stop_in_the_middle_frees_the_row_and_the_chat_goes_on(page, server):
    driver = page()
    say(driver, "Hello", tokens=900)
    wait(driver, "document.querySelectorAll('.token').length > 3")
    driver.find_element("id", "stop").click()
    is_done(driver)
    assert 3 < len(find(driver, ".token")) < 900 and find(driver, ".stopped")[0].text == "stopped."
    assert server.is_idle()
    say(driver, "Again", tokens=4)
    is_done(driver, 2)


@pytest.mark.full
@in_browser
def test_a_new_chat_during_an_answer_forgets_the_old_one_and_shows_the_hint_again(page, server):
    driver = page()
    hint = driver.find_element("id", "hint")
    assert "Ask the model something." in hint.text
    say(driver, "A question of the old chat", tokens=900)
    wait(driver, "document.querySelectorAll('.token').length > 3")
    assert not hint.is_displayed()
    driver.find_element("id", "reset").click()
    assert server.is_idle() and not find(driver, ".said") and hint.is_displayed()
    server.log.lines.clear()
    say(driver, "Hello", tokens=4)
    is_done(driver)
    asked = server.post("/tokenize", messages=[{"role": "user", "content": "Hello"}]).json()["count"]
    assert f'"prompt_tokens": {asked},' in server.lines(1)[0]


def bodies(driver) -> Callable[[], list[dict]]:
    """Return a way to read the requests that the page has sent from now on."""
    driver.execute_script(
        "window.sent = []; const ask = window.fetch;"
        "window.fetch = (path, given) => { sent.push(JSON.parse(given.body)); return ask(path, given); };"
    )
    return lambda: driver.execute_script("return sent")


@pytest.mark.full
@in_browser
def test_settings_are_sent_with_a_question_and_empty_ones_are_not(page):
    driver = page()
    sent = bodies(driver)
    driver.find_element("id", "more").click()
    driver.find_element("id", "system").send_keys("Be brief.")
    say(driver, "Hello", tokens=4, temperature=0.5, top_p=0.9, seed="")
    is_done(driver)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (body,) = sent()
    assert {name: body[name] for name in body if name not in ("stream", "tide")} == dict(
        messages=messages, temperature=0.5, top_p=0.9, max_tokens=4
    )
    say(driver, "Again")
    is_done(driver, 2)
    roles = [message["role"] for message in sent()[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"], "the system prompt is sent once"


@pytest.mark.full
@in_browser
def test_the_last_answer_is_asked_for_again_with_the_next_seed(page):
    driver = page()
    sent = bodies(driver)
    for count, text in enumerate(("Hello", "And then?"), start=1):
        say(driver, text, tokens=8, temperature=1, seed=5)
        is_done(driver, count)
    shown = [button for button in find(driver, ".again") if button.is_displayed()]
    assert len(shown) == 1, "earlier answers stay: later ones follow from them"
    shown[0].click()
    wait(driver, "sent.length === 3")
    is_done(driver, 2)
    _, second, third = sent()
    assert third == second | {"seed": 6}
    assert [said.text for said in find(driver, ".said")] == ["Hello", "And then?"]


@pytest.mark.full
@in_browser
@pytest.mark.parametrize("clipboard", ["{writeText: async (text) => { window.copied = text; }}", "undefined"])
def test_an_answer_is_copied_with_and_without_a_clipboard(page, clipboard):
    driver = page()
    driver.execute_script(
        f"Object.defineProperty(navigator, 'clipboard', {{ value: {clipboard} }});"
        "document.addEventListener('copy', () => { window.copied = document.activeElement.value; });"
    )
    sent = bodies(driver)
    say(driver, "Hello", tokens=8)
    is_done(driver)
    find(driver, ".copy")[0].click()
    wait(driver, "document.querySelector('.copy').textContent === 'Copied'")
    say(driver, "Again")
    is_done(driver, 2)
    assert driver.execute_script("return window.copied") == sent()[1]["messages"][1]["content"] != ""


@pytest.mark.full
@in_browser
def test_options_take_one_line_on_a_screen_and_little_room_on_a_phone(page):
    driver = page(1280, 800)
    driver.find_element("id", "more").click()
    for row in find(driver, ".options"):
        parts = [part.rect for part in row.find_elements("css selector", ":scope > :not(.wide)")]
        middles = [part["y"] + part["height"] / 2 for part in parts]
        assert len(parts) > 2 and max(middles) - min(middles) < 8, "one line"
    driver = page(390, 780)
    assert not driver.find_element("id", "settings").is_displayed()
    assert driver.find_element("tag name", "header").rect["height"] < 780 / 8
    assert driver.find_element("tag name", "footer").rect["height"] < 780 / 5
    driver.find_element("id", "more").click()
    assert driver.find_element("id", "temperature").is_displayed()
    assert driver.execute_script(OUTSIDE) == 0
    assert driver.execute_script("return document.documentElement.scrollHeight") <= 780


@pytest.mark.full
@in_browser
def test_the_end_of_a_growing_chat_stays_in_view(page):
    driver = page(390, 780)
    driver.find_element("id", "both").click()
    for count in (1, 2):
        say(driver, "Hello", tokens=60)
        wait(driver, f"document.querySelectorAll('.compared').length === {count} && !document.getElementById('send').disabled")
    bottom = driver.find_element("tag name", "footer").rect["y"]
    button = find(driver, ".again")[-1].rect
    assert button["y"] + button["height"] <= bottom


@pytest.mark.full
@in_browser
def test_an_error_is_shown_in_its_place(page, another):
    driver = page()
    say(driver, "x" * 2000, tokens=4)
    is_done(driver)
    assert "maximum context length is 1024" in find(driver, ".error")[0].text
    locked = another(ServerSettings(api_keys=("secret",)), router=None)
    driver = page(url=locked.url)
    wait(driver, "document.getElementById('model').textContent.startsWith('expected a valid API key')")
    driver.find_element("id", "key").send_keys("secret\t")
    wait(driver, "document.getElementById('model').textContent === 'tiny'")
    say(driver, "Hello", tokens=4)
    is_done(driver)
    assert not find(driver, ".error")


@pytest.mark.full
@in_browser
@pytest.mark.parametrize(("width", "height"), [(360, 740), (1280, 800)])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_phones_and_screens_in_light_and_dark(page, browser, tmp_path, width, height, dark):
    driver = page(width, height, dark)
    driver.find_element("id", "both").click()
    say(driver, "Hello", tokens=12)
    wait(driver, "document.querySelector('.compared')")
    assert driver.execute_script(OUTSIDE) == 0
    assert driver.execute_script("return document.documentElement.scrollHeight") <= height
    paper = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == dark
    first, second = (card.rect for card in find(driver, ".answer"))
    assert (first["y"] < second["y"]) == (width < 700)
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 5_000
