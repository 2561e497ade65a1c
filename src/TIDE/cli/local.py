"""A chat with an engine, in the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import typer

from TIDE.cli.answer import figures, finish_reason, record, write
from TIDE.cli.colours import Pieces
from TIDE.cli.talk import Talk


class LocalTalk(Talk):
    """A chat with an engine. The KV cache is reused from turn to turn."""

    def __init__(self, engine: Any, tokenizer: Any, *settings: Any) -> None:
        import TIDE

        super().__init__(*settings)
        self.engine, self.tokenizer = engine, tokenizer
        self.conversation = TIDE.Conversation(engine)

    def answer(self, said: str) -> None:
        pieces = Pieces(self.tokenizer, self.sampling.stop or ())
        self.ctrl_c.was_pressed = False
        write(self.engine, pieces, self._tokens(said), self.depth and not self.as_json, quiet=self.as_json)
        self.keep(said, pieces.shown)
        if self.as_json:
            typer.echo(json.dumps(record(self.engine, said, pieces)))
            return
        stats = self.engine.last_stats
        if not self.depth:
            typer.echo(figures(len(pieces.ids), stats.tokens_per_second, stats.mean_depth, stats.num_layers), err=True)
        self.tell_if_cut(finish_reason(self.engine, pieces), len(pieces.ids))

    def _tokens(self, said: str) -> Iterator[int]:
        """Yield the tokens of the answer until its end or Ctrl-C."""
        inputs = self.tokenizer.apply_chat_template(
            self.asked(said), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.engine.model.device)
        for token in self.conversation.stream(**inputs, **self.sampling.for_engine(self.again)):
            yield token
            if self.ctrl_c.was_pressed:
                return

    @property
    def stats(self) -> str:
        """Depths at which the tokens of the last answer were decided; empty before the first."""
        found = self.engine.last_stats
        return found.summary() if found.total_tokens else ""
