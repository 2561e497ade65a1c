"""The report in a real browser: what a token says when it is pointed at, on a phone, in light and dark, by keyboard."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from TIDE.plots.report import where, write_report
from TIDE.run import Token

PICTURES = Path(__file__).parents[2] / "docs" / "pictures.py"
Browser = runpy.run_path(str(PICTURES))["Browser"]  # which takes the pictures of docs too
pytestmark = [pytest.mark.full, pytest.mark.skipif(Browser.missing() is not None, reason=str(Browser.missing()))]
WINDOWS = [(360, 740), (1280, 800)]
OUTSIDE = "return [...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
COVERED = """
const box = document.getElementById("tip").getBoundingClientRect(), found = new Set();
for (let x = box.left + 1; x < box.right; x += 4)
  for (let y = box.top + 1; y < box.bottom; y += 4)
    for (const element of document.elementsFromPoint(x, y))
      if (element.closest(".answer")) found.add(element.textContent);
return [...found];
"""  # what is painted beneath the panel, as the browser knows it
PAINTED = """
return [...document.querySelectorAll(".answer, .answer *")]
  .filter(e => !["rgba(0, 0, 0, 0)", "transparent"].includes(getComputedStyle(e).backgroundColor)).map(e => e.textContent);
"""


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes the page of a run."""

    def write(run):
        path = tmp_path_factory.mktemp("report") / "run.html"
        write_report(run, path)
        return path

    return write


@pytest.fixture(scope="module")
def page(run, written):
    return written(run)


@pytest.fixture(scope="module")
def chat_page(chat, written):
    return written(chat)


def ask(browser, script, *arguments):
    return browser.driver.execute_script(script, *arguments)


def tip(browser):
    """The details in the panel; none while it says how to get them."""
    lines = browser.driver.find_element("id", "tip").text.splitlines()
    return [] if "".join(lines).startswith("Hover over or tap a token") else lines


def press(browser, key):
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).send_keys(key).perform()


def hover(browser, number):
    browser.hover(f".token:nth-child({number + 1})")


def box(browser, selector):
    script = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return [box.top, box.bottom]"
    return ask(browser, script, selector)


def test_pointing_at_a_token_shows_it_its_depth_its_score_and_the_full_models_token(browser, page):
    browser.open(page, 900, 900)
    assert tip(browser) == []
    hover(browser, 3)
    assert tip(browser) == ["␣and", "depth", "after 6 of 8 layers", "router score", "0.75", "full model", "␣then"]
    hover(browser, 2)
    assert tip(browser) == [
        "␣rises",
        "depth",
        "all 8 layers",
        "router score",
        "none (ran all layers)",
        "full model",
        "same token",
    ]
    browser.hover(".line")
    assert tip(browser)[:3] == ["↵↵", "depth", "before the first layer"]
    browser.hover("h1")
    assert tip(browser) == []


def test_tokens_that_look_like_html_are_text(browser, page, run):
    browser.open(page, 900, 900)
    assert ask(browser, "return document.querySelectorAll('script').length") == 1
    shown = ask(browser, "return document.querySelector('.answer').textContent")
    assert shown == "".join(token.text for token in run.tokens)
    assert ask(browser, "return document.querySelector('.prompt').textContent") == run.prompt


@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_a_legend_above_the_answer_names_the_colour_of_every_depth(browser, chat_page, chat, width, height):
    browser.open(chat_page, width, height)
    items = browser.driver.find_elements("css selector", ".legend li")
    depths = sorted({token.depth for token in chat.tokens})
    assert [item.text for item in items[: len(depths)]] == [where(depth, 8) for depth in depths]
    assert all(item.is_displayed() for item in items) and "full model" in items[-1].text
    for depth, colour in zip(depths, computed(browser, ".legend i", "backgroundColor"), strict=True):
        number = next(n for n, token in enumerate(chat.tokens) if token.depth == depth and token.text.strip())
        assert colour == next(computed(browser, f".token:nth-child({number + 1}) .word", "backgroundColor"))
    assert 0 <= box(browser, ".answer")[0] - box(browser, ".legend")[1] < 40


@pytest.mark.parametrize(("width", "height"), [(320, 640), *WINDOWS])
def test_the_panel_fits_the_page_and_covers_no_text_of_the_answer(browser, chat_page, chat, width, height, tmp_path):
    browser.open(chat_page, width, height)
    for number in range(0, len(chat.tokens), 9):
        if not chat.tokens[number].text.strip():
            continue
        hover(browser, number)
        assert tip(browser)[0].replace("␣", " ").startswith(chat.tokens[number].text)
        top, bottom = box(browser, "#tip")
        left, right = ask(browser, "const box = tip.getBoundingClientRect(); return [box.left, box.right]")
        assert 0 <= top < bottom <= height and 0 <= left < right <= width
        assert ask(browser, "return document.documentElement.scrollWidth") <= width
        assert ask(browser, COVERED) == [], chat.tokens[number]
    ask(browser, "document.querySelector('pre').scrollIntoView({ block: 'end' })")
    assert ask(browser, COVERED) == []
    if width < 900:  # nothing stays hidden beneath it either
        assert box(browser, "pre")[1] <= box(browser, "#tip")[0]
    assert ask(browser, OUTSIDE) == 0
    browser.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_pointing_at_a_token_moves_nothing(browser, chat_page):
    for width, height in WINDOWS:
        browser.open(chat_page, width, height)
        hover(browser, 0)
        before = box(browser, "#tip"), box(browser, ".answer")
        for number in (1, 2, 3):
            hover(browser, number)
            assert (box(browser, "#tip"), box(browser, ".answer")) == before
        browser.hover("h2")
        assert box(browser, ".answer")[1] - box(browser, ".answer")[0] == before[1][1] - before[1][0]


@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_only_words_are_coloured_so_lines_have_no_stubs(browser, chat_page, width, height):
    browser.open(chat_page, width, height)
    painted = ask(browser, PAINTED)
    assert len(painted) > 100
    assert [text for text in painted if not text or re.search(r"\s", text)] == []


def test_newlines_are_marked_and_can_be_pointed_at(browser, chat_page, chat):
    browser.open(chat_page, 360, 740)
    marks = ask(browser, "return [...document.querySelectorAll('.line')].map(e => getComputedStyle(e, '::before').content)")
    assert len(marks) == sum(bool(re.search(r"[\r\n]", token.text)) for token in chat.tokens) and set(marks) == {'"↵"'}
    for text, shown in {" \n\n": "␣↵↵", "\n- ": "↵-␣", "\n": "↵"}.items():
        number = next(n for n, token in enumerate(chat.tokens) if token.text == text)
        browser.hover(f".token:nth-child({number + 1}) .line")
        assert tip(browser)[0] == shown


def test_special_tokens_are_labels_and_the_last_one_says_end(browser, chat_page, chat):
    browser.open(chat_page, 360, 740)
    labels = browser.driver.find_elements("css selector", ".label")
    assert [label.text for label in labels] == ["<|tool|>", "<|im_end|>"]
    script = "return [...document.querySelectorAll('.label')].map(e => getComputedStyle(e, '::before').content)"
    assert [text.replace('"', "").split()[0] for text in ask(browser, script)] == ["special", "end"]
    assert all(label.value_of_css_property("border-top-style") == "solid" for label in labels)
    hover(browser, len(chat.tokens) - 1)
    assert tip(browser)[:3] == ["<|im_end|> (special token)", "depth", "all 8 layers"]


ODD = {
    "empty": dict(tokens=(), tokens_per_second=0.0),
    "one token": dict(tokens=(Token("Yes", 8, None, "Yes"),)),
    "exits off": dict(mode="exits off", tokens=(Token("Yes", 8, None, "Yes"), Token(".", 8, None, "."))),
    "right to left": dict(prompt="ما هو البحر؟", tokens=(Token("البحر", 3, 0.5, "البحر"), Token(" واسع", 8, None, " كبير"))),
    "a long word": dict(tokens=(Token("w" * 300, 0, 0.5, "v" * 300),)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_answers_fit_the_page(browser, run, written, name):
    odd = dataclasses.replace(run, **ODD[name])
    for width, height in ((320, 640), (1280, 800)):
        browser.open(written(odd), width, height)
        for number in range(len(odd.tokens)):
            hover(browser, number)
            assert ask(browser, COVERED) == []
        assert ask(browser, OUTSIDE) == 0
        assert ask(browser, "return document.querySelectorAll('.legend i').length") == len({t.depth for t in odd.tokens})
    if name == "right to left":
        begins = "return [...document.querySelectorAll('.token')].map(e => e.getBoundingClientRect().right)"
        first, second = ask(browser, begins)
        assert first > second
    assert [entry for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"] == []


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
    for *colour, share in computed(browser, ".word", "backgroundColor"):
        assert contrast(ink, [share * c + (1 - share) * p for c, p in zip(colour, paper, strict=True)]) >= 4.5  # WCAG AA
    hover(browser, 3)
    for soft in (".soft", "#tip i"):
        *front, _ = next(computed(browser, soft, "color"))
        for *back, _ in (*computed(browser, ".figures li", "backgroundColor"), *computed(browser, "#tip", "backgroundColor")):
            assert min(contrast(front, paper), contrast(front, back)) >= 4.5
    browser.picture(tmp_path / "seen.png")
    assert (tmp_path / "seen.png").stat().st_size > 10_000


def test_the_keyboard_goes_from_token_to_token(browser, page):
    from selenium.webdriver.common.keys import Keys

    browser.open(page, 900, 900)
    browser.hover("h1")
    press(browser, Keys.TAB)
    assert tip(browser)[0] == "The"
    assert ask(browser, "return getComputedStyle(document.activeElement.firstChild).outlineStyle") == "solid"
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


def test_keys_scroll_a_narrow_page(browser, chat_page):
    from selenium.webdriver.common.keys import Keys

    browser.open(chat_page, 360, 740)
    press(browser, Keys.END)
    script = "const done = arguments[0]; setTimeout(() => done(document.querySelector('main').scrollTop), 600)"
    assert browser.driver.execute_async_script(script) > 500


def test_the_keyboard_keeps_its_token_clear_of_the_panel(browser, chat_page):
    from selenium.webdriver.common.keys import Keys

    browser.open(chat_page, 360, 740)
    press(browser, Keys.TAB)
    for _ in range(60):
        press(browser, Keys.ARROW_RIGHT)
        bottom = ask(browser, "return document.activeElement.getBoundingClientRect().bottom")
        assert bottom <= box(browser, "#tip")[0]


def test_a_clicked_token_stays_until_another_place_is_clicked(browser, page):
    browser.open(page, 360, 740)
    hover(browser, 3)
    browser.driver.find_element("css selector", ".token:nth-child(4)").click()
    browser.hover("h2")
    assert tip(browser)[0] == "␣and"
    browser.driver.find_element("css selector", "h2").click()
    assert tip(browser) == []
