"""`tide chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from TIDE.cli.errors import EXPECTED, WrongUsage, message_of
from TIDE.cli.model import load_quietly, with_model
from TIDE.cli.options import flag, option
from TIDE.cli.router import NoExits, Router, exits_or_off
from TIDE.cli.sampling import Sampling, System, with_sampling
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.cli.slash import HELP, obeyed
from TIDE.cli.talk import Talk
from TIDE.cli.terminal import typed, without_echo
from TIDE.config import TIDEConfig


@with_settings(*RUNNING)
@with_sampling()
@with_model
def chat(
    model: str = "default",
    *,
    router: Router = None,
    no_exits: NoExits = False,
    system: System = None,
    depth: Annotated[bool, flag("--depth", "Colour each token by the depth at which it was decided.")] = False,
    as_json: Annotated[bool, flag("--json", "Print a JSON object per turn.")] = False,
    url: Annotated[
        str | None, option("URL", "Talk to an OpenAI-compatible server instead; its key may be in TIDE_API_KEY.")
    ] = None,
    sampling: Sampling,
    config: TIDEConfig,
) -> None:
    """Chat with a model. The KV cache is reused from turn to turn; type /help for the commands of a chat.

    \b
    Examples:
      tide chat --depth --system "Answer in one sentence."
      tide chat my-org/my-model --router my.safetensors --temperature 0.7 --seed 1
      printf 'Hello!\\nAnd who are you?\\n' | tide chat --json
      tide chat --url http://127.0.0.1:8000 --depth
    """
    settings = (system, sampling, depth, as_json)
    if url is not None:
        if router is not None or no_exits or config != TIDEConfig():
            raise WrongUsage("--url goes without options of an engine: the server has its own. Leave them out.")
        from TIDE.cli.remote import RemoteTalk

        _converse(RemoteTalk(url, model, *settings))
        return
    source = exits_or_off(model, router, no_exits)
    loaded = load_quietly(model, source)
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template. Use tide generate --raw, or a model made for chat.")

    import TIDE
    from TIDE.cli.local import LocalTalk

    with TIDE.TIDE(loaded.model, source, config) as engine:
        _converse(LocalTalk(engine, loaded.tokenizer, *settings))


def _converse(talk: Talk) -> None:
    """Read messages and commands and answer them until the end of input; errors are a line each."""
    asks, failed = sys.stdin.isatty() and not talk.as_json, False
    if asks:
        typer.echo(f"{HELP}\n")
    with talk.ctrl_c:
        for read in typed(asks, talk.ctrl_c):
            try:
                with without_echo():
                    _obey_or_answer(read.text, read.is_command, talk)
            except BrokenPipeError:
                raise
            except EXPECTED as problem:
                failed = True
                typer.echo(message_of(problem), err=True)
            if talk.is_over:
                break
    if failed and not asks:
        raise typer.Exit(1)


def _obey_or_answer(text: str, is_command: bool, talk: Talk) -> None:
    if not is_command and text:
        talk.say(text)
    elif is_command and (shown := obeyed(text, talk)):
        typer.echo(shown, err=talk.as_json)
