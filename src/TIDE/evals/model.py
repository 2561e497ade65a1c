"""The model `tide` of the lm-evaluation-harness.

    import TIDE.evals.model                                                     registers it
    lm_eval.simple_evaluate(model="tide", model_args="pretrained=default,mode=exact", tasks=[...])

With several contenders every question is put to all of them before the next one, starting with another one each time, so that
a machine that slows down affects all alike. The harness gets the answers of the one that is `shown`; asked again with another
one shown, it gets answers that are there already.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from TIDE.config import TIDEConfig
from TIDE.engine.engine import TIDE
from TIDE.evals.answers import Answer, Answers, question_of
from TIDE.evals.asking import Asker, Reply
from TIDE.evals.contenders import EXACT, OFF, Contender, contenders
from TIDE.models.default import default_router
from TIDE.models.load import load_model

Question = list[Instance]  # the requests of one question, of one kind


class Compared(LM):
    """An engine whose settings are compared on the harness's tasks.

    Args:
        compared: the settings; the first one is shown.
        answers: where answers are kept, and found where they were given before.
        rows: questions that are asked together.
        max_new_tokens: most new tokens of an answer; None: as the task asks.
    """

    def __init__(
        self,
        engine: TIDE,
        tokenizer: PreTrainedTokenizerBase,
        compared: Sequence[Contender],
        answers: Answers | None = None,
        rows: int = 1,
        max_new_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.rows = engine, tokenizer, rows
        self.asker = Asker(engine, tokenizer, rows, max_new_tokens)
        self.compared = list(compared)
        self.answers = Answers() if answers is None else answers
        self.shown = self.compared[0]
        self.asked: list[str] = []  # the questions of the latest call, by hash
        self._turn = 0

    @contextlib.contextmanager
    def showing(self, contender: Contender) -> Iterator[None]:
        """Show the harness the answers of this contender."""
        held, self.shown = self.shown, contender
        try:
            yield
        finally:
            self.shown = held

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self._replies("generate_until", requests)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(value, is_greedy) for value, is_greedy in self._replies("loglikelihood", requests)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return self._replies("loglikelihood_rolling", requests)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def _replies(self, kind: str, requests: list[Instance]) -> list[Any]:
        questions = [list(group) for _, group in groupby(requests, lambda one: (one.task_name, one.doc_id))]
        hashes = [question_of(kind, [request.args for request in question]) for question in questions]
        names = [contender.name for contender in self.compared]
        missing = {key: question for key, question in zip(hashes, questions, strict=True) if not self.answers.has(names, key)}
        if missing:
            self._ask_all(kind, missing)
        self.asked = hashes
        return [reply for key in hashes for reply in self.answers.get(self.shown.name, key).replies]

    def _ask_all(self, kind: str, missing: dict[str, Question]) -> None:
        """Put questions to all contenders, in batches, and keep their answers."""
        first = [request.args for question in list(missing.values())[: self.rows] for request in question]
        for contender in self.compared:  # what is compiled or prepared at first use, for as many rows, is not timed
            with self.engine.using(contender.config, contender.exits):
                self.asker.answer(kind, first, brief=True)
        bar = tqdm(total=len(missing), desc=next(iter(missing.values()))[0].task_name, unit="question")
        with bar:
            for _, group in groupby(missing.items(), lambda item: _options(item[1])):
                batch = list(group)
                for start in range(0, len(batch), self.rows):
                    part = dict(batch[start : start + self.rows])
                    self._ask(kind, part)
                    bar.update(len(part))

    def _ask(self, kind: str, batch: dict[str, Question]) -> None:
        requests = [request for question in batch.values() for request in _numbered(kind, question)]
        sizes = [len(question) for question in batch.values()]
        kept: list[Answer] = []
        self._turn += 1
        for place in range(len(self.compared)):
            contender = self.compared[(self._turn + place) % len(self.compared)]
            with self.engine.using(contender.config, contender.exits):
                began = time.perf_counter()
                replies = iter(self.asker.answer(kind, requests))
                seconds = (time.perf_counter() - began) / len(batch)
            for key, size in zip(batch, sizes, strict=True):
                kept.append(_answer(key, contender.name, [next(replies) for _ in range(size)], seconds))
        self.answers.keep(kept)


@register_model("tide")
class Registered(Compared):
    """The same for one setting, made from the arguments that the harness is given.

    Args:
        pretrained: a hub id, a local path, or "default".
        router: a router file; None: the shipped one for the default model, none for others.
        mode: "off", "exact" or "fast"; None: exact where there is a router file, otherwise off.
        exit_threshold: of mode fast.
    """

    def __init__(
        self,
        pretrained: str = "default",
        router: str | None = None,
        mode: str | None = None,
        exit_threshold: float | None = None,
        batch_size: int | str | None = 1,
        max_new_tokens: int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        source = Path(router) if router else default_router() if pretrained == "default" else None
        mode = mode or (OFF if source is None else EXACT)
        loaded = load_model(pretrained, device=device)
        engine = TIDE(loaded.model, None if mode == OFF else source, TIDEConfig())
        compared = contenders(engine, [mode], [] if exit_threshold is None else [float(exit_threshold)])
        rows = int(batch_size or 1) if str(batch_size or 1).isdigit() else 1  # "auto": one
        super().__init__(engine, loaded.tokenizer, compared[-1:], rows=rows, max_new_tokens=max_new_tokens)


def _options(question: Question) -> str:
    """Return what the requests of a batch have to share."""
    return str(question[0].args[1]) if question[0].request_type == "generate_until" else ""


def _numbered(kind: str, question: Question) -> list[tuple[Any, ...]]:
    """Return the arguments of a question's requests; those of texts with their number among equal ones, its repeats."""
    asked = [request.args for request in question]
    if kind != "generate_until":
        return asked
    return [(*own, asked[:place].count(own)) for place, own in enumerate(asked)]


def _answer(question: str, contender: str, replies: list[Reply], seconds: float) -> Answer:
    return Answer(
        question=question,
        contender=contender,
        replies=[list(reply.value) if isinstance(reply.value, tuple) else reply.value for reply in replies],
        ids=[reply.ids for reply in replies],
        tokens=sum(reply.tokens for reply in replies),
        exited=sum(reply.exited for reply in replies),
        seconds=seconds,
    )
