"""Regions of an answer: transformers' parser of response templates, which here keeps the text of regions that it cannot read.

    Hm. <call>{"name": "f"}</call> <call>{oh no</call>
        raw of a region            raw of a broken one

Theirs raises an error at a region that it cannot read, and loses what else it has read of that piece of text. Here a region's
end carries its raw text, markers and all; a region that cannot be read ends as `region_broken`, and the text after it is read.
"""

from __future__ import annotations

import functools
from typing import Any

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


def region_parser(template: dict[str, Any], prompt: str, tools: list[dict[str, Any]] | None) -> Any:
    """Return a parser of the text after a prompt. Fields that its template requires may be missing: the text is what it is."""
    fields = {name: {**field, "optional": True} for name, field in template["fields"].items()}
    parser = _kind()({**template, "fields": fields}, prefix=prompt, tools=tools)
    parser._answer = len(parser._buffer)
    return parser


def without_calls(template: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a template by which calls are content; None: all is."""
    fields = {} if template is None else {name: field for name, field in template["fields"].items() if name != "tool_calls"}
    return {**template, "fields": fields} if template is not None and fields else None


@functools.cache
def _kind() -> type:
    from transformers.utils.chat_parsing import ResponseParser

    class RegionParser(ResponseParser):
        _from = 0  # where the region's open marker begins in the buffer
        _answer = 0  # where the answer begins; before it is text of the prompt

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, found: Any) -> None:
            self._from = found.start()
            super()._open_explicit(events, field, found)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            raw = self._buffer[max(self._from, self._answer) : self._pos]
            count, field = len(events), self._current
            try:
                super()._close_current(events)
            except UNREADABLE:
                self._reset_to_implicit()
                events.append({"type": "region_broken", "field": field, "raw": raw})
            else:
                for event in events[count:]:
                    event["raw"] = raw

    return RegionParser
