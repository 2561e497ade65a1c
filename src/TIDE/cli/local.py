"""A chat with an engine, in the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from TIDE.cli.answer import figures, record, write
from TIDE.cli.colours import Pieces
from TIDE.cli.talk import Talk


class LocalTalk(Talk):
    """A chat with an engine. The KV cache is reused from turn to turn."""

    def __init__(self, engine: Any, tokenizer: Any, *settings: Any) -> None:
        import TIDE

        super().__init__(*settings)
        self.engine, self.tokenizer = engine, tokenizer
        self.conversation = TIDE.Conversation(engine)

    def write(self, question: str) -> dict[str, Any]:
        pieces = Pieces(self.tokenizer, self.sampling.stop or ())
        write(self.engine, pieces, self._tokens(question), self.depth and not self.as_json, quiet=self.as_json)
        return record(self.engine, question, pieces)

    def figures(self, record: dict[str, Any]) -> str | None:
        layers = self.engine.last_stats.num_layers
        return None if self.depth else figures(record["tokens"], record["tokens_per_second"], record["mean_depth"], layers)

    def _tokens(self, question: str) -> Iterator[int]:
        """Yield the tokens of the answer until its end or Ctrl-C."""
        inputs = self.tokenizer.apply_chat_template(
            self.asked(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.engine.model.device)
        for token in self.conversation.stream(**inputs, **self.sampling.for_engine(self.again)):
            yield token
            if self.ctrl_c.was_pressed:
                return

    @property
    def stats(self) -> str:
        """Depths at which the tokens of the last answer were decided; empty before the first."""
        stats = self.engine.last_stats
        return stats.summary() if stats.total_tokens else ""
