"""Options of an answer: how its tokens are chosen and where it ends. One class defines them for commands and for /set.

An option that was not given is not passed on: the model's generation config decides, or the server.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from TIDE.cli.model import MaxNewTokens
from TIDE.cli.options import flag, option
from TIDE.cli.settings import with_options

UNLESS_GIVEN = "unless given, the model's"
SEED = "Seed of sampling. The same seed gives the same text, with exits or without."
CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "max_new_tokens": ("1 or more", lambda number: number >= 1),
    "temperature": ("0, or from 0.01 to 100", lambda number: number == 0 or 0.01 <= number <= 100),
    "top_p": ("above 0 and at most 1", lambda number: 0 < number <= 1),
    "top_k": ("0 or more", lambda number: number >= 0),
    "min_p": ("from 0 to 1", lambda number: 0 <= number <= 1),
    "repetition_penalty": ("from 0.01 to 100", lambda number: 0.01 <= number <= 100),
    "presence_penalty": ("from -2 to 2", lambda number: -2 <= number <= 2),
    "frequency_penalty": ("from -2 to 2", lambda number: -2 <= number <= 2),
    "seed": ("an integer of 64 bits", lambda number: -(2**63) <= number < 2**64),
    "stop": ("texts that are not empty", all),
}
SWITCH = {"on": True, "off": False}

System = Annotated[str | None, option("TEXT", "System prompt.")]


@dataclass(frozen=True)
class Sampling:
    """How the tokens of an answer are chosen, and where it ends. Types, defaults and help of the options."""

    max_new_tokens: MaxNewTokens = 256
    temperature: Annotated[float, option("NUMBER", "Sampling temperature; 0: greedy decoding.")] = 0.0
    top_p: Annotated[
        float | None, option("SHARE", f"Nucleus sampling: smallest token set with this probability; {UNLESS_GIVEN}.")
    ] = None
    top_k: Annotated[int | None, option("N", f"Sample from the N most likely tokens; 0: from all; {UNLESS_GIVEN}.")] = None
    min_p: Annotated[
        float | None, option("SHARE", f"Leave out tokens below this share of the best one's probability; {UNLESS_GIVEN}.")
    ] = None
    repetition_penalty: Annotated[
        float | None, option("NUMBER", f"Divides logits of tokens of prompt and answer; 1: none; {UNLESS_GIVEN}.")
    ] = None
    presence_penalty: Annotated[
        float | None, option("NUMBER", "Taken from logits of tokens of the answer, once; from -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, option("NUMBER", "Taken from logits of tokens of the answer, for each time; from -2 to 2.")
    ] = None
    seed: Annotated[int | None, option("N", SEED)] = None
    stop: Annotated[
        list[str] | None, option("TEXT", "Text that ends an answer and is left out; may be given several times.")
    ] = None
    ignore_eos: Annotated[bool, flag("--ignore-eos", "Go on after the model's end token.")] = False

    def __post_init__(self) -> None:
        for name, (words, is_right) in CHECKS.items():
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise ValueError(f"{name} must be {words}, found {value!r}.")

    def for_engine(self, again: int = 0) -> dict[str, Any]:
        """Return keywords for `engine.stream`, all but the stop strings.

        Args:
            again: how often the same question was answered before: each time has another seed.
        """
        found = self._given(again)
        del found["stop"]
        if found.pop("ignore_eos"):
            found["eos_token_id"] = None
        found["do_sample"] = self.temperature > 0
        if not found["do_sample"]:
            for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
                found.pop(name, None)
        return found

    def for_server(self, again: int = 0) -> dict[str, Any]:
        """Return fields of a request to a server: those of OpenAI's API, and vLLM's others only where they were given."""
        found = self._given(again)
        found["max_tokens"] = found.pop("max_new_tokens")
        for name in ("stop", "ignore_eos"):
            if not found[name]:
                del found[name]
        return found

    def with_value(self, name: str, text: str) -> Sampling:
        """Return the settings with another value of one of them, given as text; an empty one stands for the default."""
        known: dict[str, Any] = asdict(Sampling())  # and its default
        if name not in known:
            raise ValueError(f"there is no setting {name}. There are {', '.join(known)}.")
        return replace(self, **{name: _parsed(name, text) if text else known[name]})

    def shown(self, name: str) -> str:
        """Return a setting and its value in a line."""
        value = getattr(self, name)
        words = {True: "on", False: "off"}[value] if isinstance(value, bool) else "unset" if value is None else value
        return f"{name:20}{words}"

    def summary(self) -> str:
        """Return a line for each setting."""
        return "\n".join(self.shown(field.name) for field in fields(self))

    def _given(self, again: int) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self).items() if value is not None or name == "stop"}
        if self.seed is not None:
            found["seed"] = self.seed + again
        return found


def with_sampling(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Sampling`, some with other defaults; it receives them as one `sampling`."""
    hints = typing.get_type_hints(Sampling, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(Sampling)
    ]
    return with_options("sampling", options, Sampling)


def _parsed(name: str, text: str) -> Any:
    """Return the value of a setting from its text."""
    hint = typing.get_type_hints(Sampling)[name]
    kind = next(iter(typing.get_args(hint)), hint)
    if kind == list[str]:
        return [text]
    words = {bool: "on or off", int: "an integer", float: "a number"}[kind]
    try:
        return SWITCH[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{name} must be {words}, found {text!r}.") from None
