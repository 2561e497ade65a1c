"""The report in a real browser: what a token says when it is pointed at, on a phone, in light and dark, by keyboard."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from TIDE.plots.report import write_report

PICTURES = Path(__file__).parents[2] / "docs" / "pictures.py"
Browser = runpy.run_path(str(PICTURES))["Browser"]  # which takes the pictures of docs too
pytestmark = pytest.mark.skipif(Browser.missing() is not None, reason=str(Browser.missing()))
OUTSIDE = "return [...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "run.html"
    write_report(run, path)
    return path


def ask(browser, script, *arguments):
    return browser.driver.execute_script(script, *arguments)


def tip(browser):
    """The lines of the tooltip that are to be seen."""
    return browser.driver.find_element("id", "tip").text.splitlines()


def press(browser, key):
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).send_keys(key).perform()


def hover(browser, number):
    browser.hover(f".token:nth-child({number + 1})")


def test_pointing_at_a_token_shows_it_its_depth_its_score_and_the_full_models_word(browser, page):
    browser.open(page, 900, 900)
    assert tip(browser) == []
    hover(browser, 3)
    assert tip(browser) == ["␣and", "depth", "after 6 of 8 layers", "router score", "0.75", "full model", "␣then"]
    hover(browser, 2)
    assert tip(browser) == ["␣rises", "depth", "all 8 layers", "router score", "no exit let it out", "full model", "the same"]
    browser.hover(".line")
    assert tip(browser)[:3] == ["↵↵", "depth", "before the first layer"]
    browser.hover("h1")
    assert tip(browser) == []


def test_what_looks_like_html_is_text(browser, page, run):
    browser.open(page, 900, 900)
    assert ask(browser, "return document.querySelectorAll('script').length") == 1
    shown = ask(browser, "return document.querySelector('.answer').textContent")
    assert shown == "".join(token.text for token in run.tokens)
    assert ask(browser, "return document.querySelector('.prompt').textContent") == run.prompt


def test_the_whole_page_fits_a_phone_tooltips_included(browser, page, run, tmp_path):
    browser.open(page, 320, 640)
    for number in range(0, len(run.tokens), 3):
        hover(browser, number)
        left, right = ask(browser, "const box = tip.getBoundingClientRect(); return [box.left, box.right]")
        assert 0 <= left < right <= 320, run.tokens[number]
        assert ask(browser, "return document.documentElement.scrollWidth") == 320
    assert ask(browser, OUTSIDE) == 0
    browser.picture(tmp_path / "phone.png")
    assert (tmp_path / "phone.png").read_bytes().startswith(b"\x89PNG")


def luminance(colour):
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def computed(browser, selector, name):
    """A colour of every element found, as red, green, blue and how much of it there is, up to 1."""
    script = "return [...document.querySelectorAll(arguments[0])].map(e => getComputedStyle(e)[arguments[1]])"
    for text in ask(browser, script, selector, name):
        parts = [float(part) for part in re.findall(r"[\d.]+", text)]
        scale = 1 if text.startswith("color(") else 255
        yield [part / scale for part in parts[:3]] + [parts[3] if len(parts) > 3 else 1.0]


def contrast(front, back):
    light, dark = sorted((luminance(front), luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable_on_every_colour(browser, page, dark, tmp_path):
    browser.open(page, 900, 900, dark=dark)
    *paper, _ = next(computed(browser, "body", "backgroundColor"))
    *ink, _ = next(computed(browser, "body", "color"))
    assert (luminance(paper) < 0.1) == dark
    for *colour, share in computed(browser, ".token", "backgroundColor"):
        assert contrast(ink, [share * c + (1 - share) * p for c, p in zip(colour, paper, strict=True)]) >= 4.5  # WCAG AA
    *soft, _ = next(computed(browser, ".soft", "color"))
    *card, _ = next(computed(browser, ".figures li", "backgroundColor"))
    assert min(contrast(soft, paper), contrast(soft, card)) >= 4.5
    hover(browser, 3)
    browser.picture(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").stat().st_size > 10_000


def test_the_keyboard_goes_from_token_to_token(browser, page):
    from selenium.webdriver.common.keys import Keys

    browser.open(page, 900, 900)
    browser.hover("h1")
    press(browser, Keys.TAB)
    assert tip(browser)[0] == "The"
    assert ask(browser, "return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    press(browser, Keys.ARROW_RIGHT)
    press(browser, Keys.ARROW_RIGHT)
    assert tip(browser)[0] == "␣rises"
    assert ask(browser, "return document.activeElement.getAttribute('aria-describedby')") == "tip"
    press(browser, Keys.ARROW_LEFT)
    assert tip(browser)[0] == "␣sea"
    press(browser, Keys.ESCAPE)
    assert tip(browser) == []
    press(browser, Keys.TAB)  # one stop for the whole answer
    assert not ask(browser, "return document.activeElement.matches('.token')")
