"""Tokens to text, one at a time: characters of several tokens, and stop strings that are held back."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers import bytewise
from TIDE.server.text import _KNOWN, Detokenizer, StopStrings

TOKENIZER = bytewise()


@given(st.text(), st.text(max_size=8))
def test_pieces_are_the_text_whatever_was_before(text, prompt):
    before = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(TOKENIZER, before)
    pieces = [detokenizer.add(token) for token in TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    assert "".join(pieces) + detokenizer.rest() == text
    assert [piece for piece in pieces if "\ufffd" in piece and "\ufffd" not in text] == []


def test_bytes_that_become_no_character_come_at_the_end():
    first, *_ = TOKENIZER("é", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(TOKENIZER, [])
    assert [detokenizer.add(first), detokenizer.rest(), detokenizer.rest()] == ["", "\ufffd", ""]


def test_texts_of_few_tokens_are_remembered_and_those_of_many_are_not():
    class Tokenizer:
        calls = 0

        def decode(self, ids, skip_special_tokens):
            self.calls += 1
            return ""  # as for special tokens, which may come again and again

    tokenizer = Tokenizer()
    for _ in range(2):
        detokenizer = Detokenizer(tokenizer, [1])
        for _ in range(50):
            assert detokenizer.add(2) == ""
    assert tokenizer.calls < 2 * 50 + 2 * 50
    assert all(len(key) <= 5 for key in detokenizer._texts)
    known = len(_KNOWN)
    del tokenizer, detokenizer
    gc.collect()
    assert len(_KNOWN) == known - 1


def test_special_tokens_are_text_for_a_parser_only():
    for keeps, text in ((True, "<bot>"), (False, "")):
        assert Detokenizer(TOKENIZER, [], keeps).add(TOKENIZER.convert_tokens_to_ids("<bot>")) == text


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_is_released_up_to_the_first_stop_string_and_as_soon_as_it_may(pieces, stops):
    whole = "".join(pieces)
    found = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += found.add(piece)
        seen = whole[: len(shown)]
        assert shown == seen and not any(stop in shown for stop in stops)
        if found.found:
            break
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert found.found == bool(places)
    assert shown + found.rest() == whole[: len(whole)] if not places else shown == _before_first(pieces, stops)


def _before_first(pieces: list[str], stops: list[str]) -> str:
    """The text before the stop string that was complete first."""
    text = ""
    for piece in pieces:
        for letter in piece:
            text += letter
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            return text[: min(places)]
    raise AssertionError("there is none")


def test_a_stop_string_that_comes_too_early_is_text():
    stops = StopStrings(["ab", "cab!"])
    shown = [stops.add("ab", may_stop=False), stops.add("xcab", may_stop=False)]
    assert shown == ["ab", "x"] and not stops.found, "what may yet become a stop string is held back"
    assert stops.add("?") == "cab?" and not stops.found
    assert stops.add("yab") == "y" and stops.found
    across = StopStrings(["abc"])
    assert [across.add("xa", may_stop=False), across.add("bcd")] == ["x", ""] and across.found


@pytest.mark.parametrize(("text", "held"), [("xa", "a"), ("xab", "ab"), ("xb", ""), ("xaab", "ab")])
def test_only_the_beginning_of_a_stop_string_is_held_back(text, held):
    stops = StopStrings(["abc"])
    assert stops.add(text) == text.removesuffix(held) and stops.rest() == held
