"""Texts the model writes itself: exits have to learn the distribution that the model produces.

    wave 1   openings of its own: user messages, sampled from the model in the user's place
    wave 2   answers to those and to the built-in prompts; continuations of built-in openings
    wave 3   answers to tasks about passages of wave 2 (summarise, translate, question …)

Most answers are greedy, the rest sampled. The same seed gives the same texts.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from TIDE.adapters.probe import input_device
from TIDE.calibration.free_memory import free_memory
from TIDE.calibration.grouped_attention import grouped, without_plans
from TIDE.calibration.roomy_cache import roomy_cache
from TIDE.calibration.text import Text

ANSWER = 256  # longest answer, in tokens
OPENING = 64  # longest opening of its own
MOST_BUILTIN = 1000  # answers to built-in prompts
SAMPLED = 0.25  # share of answers that are sampled rather than greedy
TEMPERATURES = (0.6, 0.8, 1.0)
WRITING_SHARE = 0.55  # of a GPU's free memory
CPU_TOKENS = 8192  # per batch without a GPU
MATERIAL = 768  # most tokens of passages in a task
TRIAL = 8  # steps that are timed, with few rows and with many
TYPICAL = 96  # tokens of a prompt
WITHOUT_CHAT = (
    "so no chat can be written with it. Set tokenizer.chat_template = None to calibrate on plain text, or give a data set."
)
TASKS = 1.25  # times as long as a text takes by that: prompts of tasks are longer


@dataclass(frozen=True)
class _Order:
    """A prompt to be continued."""

    prompt: list[int]
    group: int
    temperature: float  # 0: greedy


def builtin_prompts() -> dict[str, list[str]]:
    """Return the prompts of the package, by section."""
    sections: dict[str, list[str]] = {}
    for line in (files("TIDE.calibration") / "prompts.txt").read_text("utf-8").splitlines():
        if line.startswith("## "):
            section = sections.setdefault(line[3:], [])
        elif line:
            section.append(line.replace("\\n", "\n"))
    return sections


def write_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, answer: int = ANSWER
) -> list[Text]:
    """Generate texts with the model."""
    author = _Author(model, tokenizer, seed, answer)
    third = max(1, min(count // 3, MOST_BUILTIN))
    orders = author.builtin_orders(third) + author.prefills((count - third) // 2, "texts 1/3: openings of its own")
    texts = author.answers(orders, "texts 2/3: answers to those and to built-in prompts")
    return texts + author.answers(author.task_orders(texts, count - len(texts)), "texts 3/3: tasks about these")


def writing_seconds(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, answer: int = ANSWER
) -> Callable[[int], float]:
    """Return how long a number of texts takes to write, by `_pace`."""
    pace = _pace(_Author(model, tokenizer, seed, answer))

    def seconds(count: int) -> float:
        """Half of the texts are answers, half are tasks about those; half of the answers have openings of their own."""
        rows, batches = min(pace.fit, -(-count // 2)), -(-count // 2 // pace.fit) or 1
        return TASKS * batches * (2 * pace.answer + OPENING) * pace.step(rows)

    return seconds


def answering_seconds(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, answer: int = ANSWER
) -> Callable[[int], float]:
    """Return how long answers to a number of given prompts take, by `_pace`."""
    pace = _pace(_Author(model, tokenizer, seed, answer))
    return lambda count: -(-count // pace.fit) * pace.answer * pace.step(min(pace.fit, count))


class _Pace(NamedTuple):
    """How fast texts are written: rows that fit into a batch, tokens of an answer, and seconds of a step by rows."""

    fit: int
    answer: int
    step: Callable[[int], float]


def _pace(author: _Author) -> _Pace:
    """Time a few steps of few and of many rows."""
    fit = max(1, _tokens_that_fit(author.model) // (TYPICAL + author.answer))
    few, many = max(1, min(8, fit // 2)), min(fit, 512 if author._devices() else 16)
    orders = author.builtin_orders(many)
    author._continue(orders[:few], 2)  # the first steps take longer
    times = [author.step_seconds(orders[:count]) for count in (few, many)]
    per_row = max(0.0, times[1] - times[0]) / max(1, many - few)
    return _Pace(fit, author.answer, lambda rows: times[0] + per_row * (rows - few))


class _Author:
    """A model with the prompts and settings to generate texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int, answer: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.random = random.Random(seed)
        self.seed = seed
        self.context = context_length(model)
        self.answer = min(answer, self.context // 2)
        self.prompts = builtin_prompts()
        self.groups = itertools.count()
        self.frame = chat_frame(tokenizer)

    def builtin_orders(self, count: int) -> list[_Order]:
        """Return orders for built-in prompts, alternating between sections; every prompt greedily first, then sampled."""
        sections = [[(name, text) for text in own] for name, own in self.prompts.items() if name != "tasks"]
        for section in sections:
            self.random.shuffle(section)
        everything = [entry for turn in itertools.zip_longest(*sections) for entry in turn if entry is not None]
        groups = [next(self.groups) for _ in everything]
        return [
            _Order(
                self._asked(*everything[i % len(everything)]),
                groups[i % len(everything)],
                self._heat(i >= len(everything)),
            )
            for i in range(count)
        ]

    def prefills(self, count: int, title: str) -> list[_Order]:
        """Return orders whose prompts the model wrote: user turns in its chat template, or the first words of a text."""
        before, _ = self.frame
        orders = [_Order(self._ids(before) if before else self._begin(), next(self.groups), 1.0) for _ in range(count)]
        texts = self._write(orders, OPENING, title)
        found = []
        for text in texts:
            words = self.tokenizer.decode(text.ids[text.start :], skip_special_tokens=True).strip()
            if words:
                kind = "chat" if before else "openings"
                found.append(_Order(self._asked(kind, words), text.group, self._heat(self.random.random() < SAMPLED)))
        return found

    def task_orders(self, texts: list[Text], count: int) -> list[_Order]:
        """Return orders for tasks about passages the model wrote. A task belongs to the group of its passage."""
        passages = [text for text in texts if len(text.ids) - text.start >= 32] or texts
        alike = {side: [text for text in passages if text.is_held_out == side] for side in (True, False)}
        orders = []
        for _ in range(count):
            first = self.random.choice(passages)
            chosen = [first, *self.random.choices(alike[first.is_held_out], k=self.random.choice((0, 0, 1, 2)))]
            room = min(MATERIAL, self.context // 4) // len(chosen)
            words = [self.tokenizer.decode(text.ids[text.start :][:room], skip_special_tokens=True).strip() for text in chosen]
            task = self.random.choice(self.prompts["tasks"]).replace("{text}", "\n\n".join(words))
            heat = self._heat(self.random.random() < SAMPLED)
            orders.append(_Order(self._asked("tasks", task), chosen[0].group, heat))
        return orders

    def answers(self, orders: list[_Order], title: str) -> list[Text]:
        return self._write(orders, self.answer, title)

    def step_seconds(self, orders: list[_Order]) -> float:
        """Return the seconds of a step that gives each row a token."""
        if self._devices():
            self._continue(orders, 2)  # kernels are chosen by numbers of rows
        took = []
        for steps in (2, 2 + TRIAL):
            began = time.perf_counter()
            self._continue(orders, steps)  # its tokens come to the host, so it has ended then
            took.append(time.perf_counter() - began)
        return max(took[1] - took[0], took[1] / (100 * TRIAL)) / TRIAL

    def _heat(self, sampled: bool) -> float:
        return self.random.choice(TEMPERATURES) if sampled else 0.0

    def _begin(self) -> list[int]:
        words = self.random.choice(self.prompts["openings"]).split()
        return self._ids(" ".join(words[: self.random.randint(1, 4)]))

    def _asked(self, section: str, text: str) -> list[int]:
        """Return the token ids of a prompt, in the chat template unless it is an opening to be continued."""
        before, after = self.frame
        ids = self._ids(text if section == "openings" else before + text + after)
        return ids[-max(1, self.context - self.answer) :]

    def _ids(self, text: str) -> list[int]:
        templated = bool(self.frame[0]) and text.startswith(self.frame[0])
        ids = self.tokenizer(text, add_special_tokens=not templated)["input_ids"]
        return list(ids) or [self.tokenizer.bos_token_id or self.tokenizer.eos_token_id or 0]

    def _write(self, orders: list[_Order], longest: int, title: str) -> list[Text]:
        """Continue every prompt, in batches of similar length."""
        texts: list[Text | None] = [None] * len(orders)
        with tqdm(total=len(orders), desc=title, unit="text") as bar, torch.random.fork_rng(self._devices()):
            torch.manual_seed(self.seed)
            for batch in self._batches(orders, longest):
                for index, ids in zip(batch, self._continue([orders[i] for i in batch], longest), strict=True):
                    texts[index] = Text(ids, len(orders[index].prompt), orders[index].group)
                bar.update(len(batch))
                if self._devices():
                    torch.cuda.empty_cache()  # the next batch has other sizes, which would not fit into the freed blocks
        return [text for text in texts if text is not None and len(text.ids) > text.start]

    def _continue(self, orders: list[_Order], longest: int) -> list[list[int]]:
        width, device = max(len(order.prompt) for order in orders), input_device(self.model)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.tensor([[pad] * (width - len(o.prompt)) + o.prompt for o in orders], device=device)
        mask = torch.tensor([[0] * (width - len(o.prompt)) + [1] * len(o.prompt) for o in orders], device=device)
        heats = _Heats(torch.tensor([order.temperature for order in orders], device=device))
        with without_plans(), grouped(self.model):
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(1, min(longest, self.context - width)),
                pad_token_id=pad,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                logits_processor=LogitsProcessorList([heats]),
                past_key_values=roomy_cache(self.model, width + longest),
            )
        ends = end_tokens(self.model)
        return [o.prompt + _until_end(row[width:], ends) for o, row in zip(orders, out.tolist(), strict=True)]

    def _batches(self, orders: list[_Order], longest: int) -> Iterator[list[int]]:
        """Yield batches of orders of similar length, as many as fit."""
        most = _tokens_that_fit(self.model)
        batch: list[int] = []
        for index in sorted(range(len(orders)), key=lambda i: len(orders[i].prompt)):
            if batch and (len(batch) + 1) * (len(orders[index].prompt) + longest) > most:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _devices(self) -> list[torch.device]:
        return [input_device(self.model)] if input_device(self.model).type == "cuda" else []


class _Heats(LogitsProcessor):
    """A logits processor with a temperature for each row; 0 leaves only the most likely token."""

    def __init__(self, heats: torch.Tensor) -> None:
        self.heats = heats[:, None]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best = torch.full_like(scores, float("-inf")).scatter_(1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(self.heats > 0, scores / self.heats.clamp(min=1e-3), best)


def context_length(model: PreTrainedModel) -> int:
    """Return the context length of the model; a very large number if its config has none."""
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 1 << 30)


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text that the chat template puts before and after a user message; empty if there is no template."""
    if tokenizer.chat_template is None:
        return "", ""
    marker = "\u241fuser\u241f"
    asked = [{"role": "user", "content": marker}]
    try:
        text = str(tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False))
    except Exception as problem:  # templates may raise anything
        said = " ".join(str(problem).split())
        raise ValueError(f"the tokenizer's chat template refuses a message of the user ({said}), {WITHOUT_CHAT}") from problem
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError(f"the tokenizer's chat template does not show what the user says, {WITHOUT_CHAT}")
    return before, after


def _tokens_that_fit(model: PreTrainedModel) -> int:
    """Return the number of tokens whose K/V and activations of one layer take about half of the device's free memory."""
    if input_device(model).type != "cuda":
        return CPU_TOKENS
    config = model.config.get_text_config(decoder=True)
    hidden = config.hidden_size
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    kept = 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    worked_on = (3 * inner + 10 * hidden) * model.dtype.itemsize + 3 * hidden * 4  # norms work in fp32
    return int(free_memory(input_device(model)) * WRITING_SHARE) // (kept + worked_on)


def _until_end(ids: list[int], ends: set[int]) -> list[int]:
    """Return ids up to and including the first end token."""
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids


def answer_prompts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], seed: int, answer: int = ANSWER
) -> list[Text]:
    """Generate greedy answers to given prompts. The group of a text is the index of its prompt."""
    author = _Author(model, tokenizer, seed, answer)
    orders = [_Order(author._asked("chat", prompt), place, 0.0) for place, prompt in enumerate(prompts)]
    return author.answers(orders, "answers to given prompts")
