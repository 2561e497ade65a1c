"""A chat: its messages so far, the streamed answers, and the file it is saved to."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TIDE.cli.colours import Pieces
from TIDE.cli.files import check_target


class Messages:
    """The messages of a chat. A turn without an answer is dropped."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.file: Path | None = None  # where this chat was saved
        self.reset()

    def reset(self) -> None:
        """Clear the messages, and the file they were saved to."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.file = None

    def asked(self, said: str) -> list[dict[str, str]]:
        """Return the messages with one more of the user's."""
        return [*self.messages, {"role": "user", "content": said}]

    def keep(self, said: str, answer: str) -> None:
        """Add a turn, if there is an answer."""
        if answer:
            self.messages = [*self.asked(said), {"role": "assistant", "content": answer}]

    def save(self, name: str = "") -> Path:
        """Write the messages as JSON: to a new file, or again to the file of this chat."""
        if all(message["role"] == "system" for message in self.messages):
            raise ValueError("there is nothing to save yet. Say something first.")
        path = Path(name).expanduser() if name else self.file or Path(time.strftime("tide-chat-%Y%m%d-%H%M%S.json"))
        check_target(path, (".json",))
        if path.exists() and path != self.file:
            raise FileExistsError(f"there is a {path} already. Give another name.")
        path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.file = path
        return path


class Talk(Messages):
    """A chat with an engine, in the model's chat template."""

    def __init__(self, engine: Any, tokenizer: Any, system: str | None) -> None:
        import TIDE

        super().__init__(system)
        self.engine, self.tokenizer = engine, tokenizer
        self.conversation = TIDE.Conversation(engine)

    def ask(self, said: str, pieces: Pieces, options: dict[str, Any]) -> Iterator[int]:
        """Yield the tokens of the answer until its end or Ctrl-C; then keep the text in `pieces` as the answer."""
        with interrupts() as were_noted:
            inputs = self.tokenizer.apply_chat_template(
                self.asked(said), add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(self.engine.model.device)
            for token in self.conversation.stream(**inputs, **options):
                yield token
                if were_noted():
                    break
        self.keep(said, pieces.shown)

    @property
    def stats(self) -> str:
        """Depths at which the tokens of the last answer were decided; empty before the first."""
        found = self.engine.last_stats
        return found.summary() if found.total_tokens else ""


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C instead of raising KeyboardInterrupt: a step of the engine is completed, and its K/V stay usable."""
    noted: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append(True))
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
