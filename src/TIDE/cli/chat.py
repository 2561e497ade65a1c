"""`tide chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from TIDE.cli.colours import Pieces, show
from TIDE.cli.errors import EXPECTED, WrongUsage, told
from TIDE.cli.files import decoded
from TIDE.cli.generate import Temperature, record, write
from TIDE.cli.model import MaxNewTokens, load, with_model
from TIDE.cli.remote import RemoteTalk
from TIDE.cli.router import NoExits, Router, exits_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.cli.talk import Talk
from TIDE.config import TIDEConfig

COMMANDS = {
    "/help": "show these commands",
    "/reset": "clear the conversation",
    "/save [FILE]": "write the conversation to a JSON file",
    "/stats": "show where the tokens of the last answer were decided",
    "/quit": "leave (also /exit, or end of input)",
}
HELP = "\n".join(f"{name:14}{said}" for name, said in COMMANDS.items()) + "\nCtrl-C stops the current answer."


@with_settings(*RUNNING)
@with_model
def chat(
    model: str = "default",
    *,
    router: Router = None,
    no_exits: NoExits = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    depth: Annotated[bool, typer.Option("--depth", help="Colour each token by the depth at which it was decided.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per turn.")] = False,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Talk to an OpenAI-compatible server instead; its key may be in TIDE_API_KEY."),
    ] = None,
    config: TIDEConfig,
) -> None:
    """Chat with a model. The KV cache is reused from turn to turn; type /help for the commands of a chat.

    \b
    Examples:
      tide chat --depth --system "Answer in one sentence."
      tide chat my-org/my-model --router my.safetensors
      printf 'Hello!\\nAnd who are you?\\n' | tide chat --json
      tide chat --url http://127.0.0.1:8000 --depth
    """
    if url is not None:
        if router is not None or no_exits or config != TIDEConfig():
            raise WrongUsage("--url goes without options of an engine: the server has its own. Leave them out.")
        _talk_to_server(RemoteTalk(url, model, system, max_new_tokens, temperature, depth), as_json)
        return
    import TIDE

    source = exits_path(model, router, no_exits)
    loaded = load(model, exits=source)
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template. Use tide generate --raw, or a model made for chat.")
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, do_sample=temperature > 0)
    if temperature > 0:
        options["temperature"] = temperature
    with TIDE.TIDE(loaded.model, source, config) as engine:
        talk = Talk(engine, loaded.tokenizer, system)

        def answer(said: str) -> None:
            pieces = Pieces(loaded.tokenizer)
            write(engine, talk.ask(said, pieces, options), pieces, depth and not as_json, quiet=as_json)
            if as_json:
                typer.echo(json.dumps(record(engine, said, pieces.shown)))

        _converse(talk, answer, as_json)


def _talk_to_server(talk: RemoteTalk, as_json: bool) -> None:
    def answer(said: str) -> None:
        for piece in talk.ask(said):
            if not as_json:
                show(piece, nl=False)
        typer.echo(json.dumps(talk.record) if as_json else "\n")

    _converse(talk, answer, as_json)


def _converse(talk: Talk | RemoteTalk, answer: Callable[[str], None], as_json: bool) -> None:
    """Read lines and answer them until the end of input; errors are a line each."""
    asks, failed = sys.stdin.isatty() and not as_json, False
    if asks:
        typer.echo(f"{HELP}\n")
    while (line := _read(asks)) is not None:
        if line.strip() in ("/quit", "/exit"):
            break
        try:
            if line.startswith("/"):
                typer.echo(_obeyed(line, talk), err=as_json)
            elif said := line.strip():
                answer(said)
        except BrokenPipeError:
            raise
        except EXPECTED as problem:
            failed = True
            typer.echo(told(problem), err=True)
    if failed and not asks:
        raise typer.Exit(1)


def _obeyed(line: str, talk: Talk | RemoteTalk) -> str:
    """Run a slash command and return the text to print."""
    name, _, rest = line.strip().partition(" ")
    if name == "/save":
        return f"written: {talk.save(rest.strip())}"
    if name == "/help" and not rest:
        return HELP
    if name == "/stats" and not rest:
        if not talk.stats:
            raise ValueError("there is no answer yet. Say something first.")
        return talk.stats
    if name == "/reset" and not rest:
        talk.reset()
        return "conversation cleared."
    raise ValueError(
        f"there is no command {line.strip()}. There are {', '.join(COMMANDS)}. Put a space before it to say it to the model."
    )


def _read(asks: bool) -> str | None:
    """Return the next line of input; None at its end."""
    if not asks:
        line = sys.stdin.buffer.readline()
        return decoded(line, "standard input").rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    try:
        return input("> ")
    except EOFError:
        typer.echo()
        return None
