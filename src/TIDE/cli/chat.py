"""`tide chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from TIDE.cli.generate import record, write
from TIDE.cli.model import Model, load
from TIDE.cli.router import Router, router_path
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig

HELP = "/stats: where the last answer's tokens were decided; /new: forget all; /quit, or end of input: leave"


@with_settings(*RUNNING)
def chat(
    model: Model = "default",
    *,
    router: Router = None,
    exits: Annotated[bool, typer.Option("--exits/--no-exits", help="Without, every token runs all layers.")] = True,
    system: Annotated[str | None, typer.Option(help="What the model is told before everything else.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token each time.")] = 0.0,
    depth: Annotated[bool, typer.Option("--depth", help="Colour each token by the depth at which it was decided.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per turn.")] = False,
    config: TIDEConfig,
) -> None:
    """Talk with a model. What was said is not run again at each turn.

    tide chat --depth --system "Answer in one sentence."

    printf 'Hello!\\nAnd who are you?\\n' | tide chat --json

    tide chat my-org/my-model --router my.safetensors
    """
    import TIDE

    source = router_path(model, router) if exits else None
    loaded = load(model)
    if loaded.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template. Use tide generate --raw, or a model made for chat.")
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, do_sample=temperature > 0)
    if temperature > 0:
        options["temperature"] = temperature
    asks = sys.stdin.isatty() and not as_json
    if asks:
        typer.echo(HELP)
    with TIDE.TIDE(loaded.model, source, config) as engine:
        talk = Talk(TIDE.Conversation(engine), loaded.tokenizer, system)
        while (said := _read(asks)) is not None:
            if said in ("/quit", "/exit"):
                return
            if said == "/new":
                talk.forget()
            elif said == "/stats":
                typer.echo(engine.last_stats.summary())
            elif said:
                tokens = talk.ask(said, options)
                answer = write(engine, loaded.tokenizer, tokens, depth and not as_json, quiet=as_json).shown
                talk.heard(answer)
                if as_json:
                    typer.echo(json.dumps(record(engine, said, answer)))


class Talk:
    """What was said, in the model's chat template."""

    def __init__(self, conversation: Any, tokenizer: Any, system: str | None) -> None:
        self.conversation, self.tokenizer, self.system = conversation, tokenizer, system
        self.forget()

    def forget(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, said: str, options: dict[str, Any]) -> Any:
        """The tokens of the answer."""
        self.messages.append({"role": "user", "content": said})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.conversation.engine.model.device)
        return self.conversation.stream(**inputs, **options)

    def heard(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})


def _read(asks: bool) -> str | None:
    """The next line; None at the end of input."""
    if asks:
        typer.echo("> ", nl=False)
    line = sys.stdin.readline()
    return line.strip() if line else None
