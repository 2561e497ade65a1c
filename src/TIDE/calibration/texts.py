"""Texts for calibration, from the source the user chose: the model itself, a file, or a data set of the hub.

    source  →  documents (prompt, answer)  →  pieces of at most 512 tokens  →  every document's first, then its second …

Counted are the tokens that a model would have to generate: in a plain document all but the first token, in a chat the last
answer. A prompt without an answer is answered by the model, greedily. A source that cannot be read is an error.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from TIDE.calibration.self_texts import ANSWER, answer_prompts, context_length, write_texts
from TIDE.calibration.text import Text
from TIDE.hub import check_datasets, hub_trouble

logger = logging.getLogger(__name__)
PIECE = 512  # longest text, in tokens
SHORTEST = 16  # shorter pieces are dropped
DOCUMENTS = 20  # with fewer, too little would be held out
SPREAD = 200  # documents to read even if a few long ones would be enough
WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1")  # the hub no longer accepts names without an owner
ANSWERS = ("response", "completion", "answer")
ACCEPTED = (
    '"text"; "prompt" with "response", "completion" or "answer"; "messages"; "question" with "answer"; "turns"; '
    '"prompt" or "question" alone'
)


class Document(NamedTuple):
    """The prompt and the answer of one record."""

    prompt: str  # the text before the counted part
    answer: str | None  # the counted part; None: the model generates it
    templated: bool = False  # True if the chat template has added the special tokens


def load_texts(
    source: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    seed: int,
    answer: int = ANSWER,
) -> list[Text]:
    """Return the texts of a source.

    Args:
        source: "self" (the model writes them); a file: .txt, documents between blank lines, or .jsonl, an object a line;
            "wikitext" or another data set of the hub as "name", "name:config" or "name:config:split".
        samples: most texts. A file with more is sampled, of a data set the first are used.
        seed: of the sample, and of the texts that the model generates.
        answer: longest text the model generates, in tokens.
    """
    if source == "self":
        return write_texts(model, tokenizer, samples, seed, answer)
    shelf: list[list[Text]] = []  # by group
    asked: dict[int, str] = {}  # group -> prompt
    longest, enough, found = min(PIECE, context_length(model)), max(DOCUMENTS, min(samples, SPREAD)), 0
    documents = _documents(source, tokenizer, seed)
    with tqdm(total=samples, desc=f"texts from {source}", unit="text") as bar:
        for document in documents:
            if document.answer is None and document.prompt.strip():
                asked[len(shelf)] = document.prompt
                shelf.append([])
                found += 1
            elif pieces := _pieces(document, tokenizer, longest, len(shelf)):
                shelf.append(pieces)
                found += len(pieces)
            bar.update(min(found, samples) - bar.n)
            if found >= samples and len(shelf) >= enough:
                break
    _check_found(source, len(shelf), found, samples)
    groups = list(asked)
    for text in answer_prompts(model, tokenizer, list(asked.values()), seed, answer) if asked else []:
        shelf[groups[text.group]] = [text._replace(group=groups[text.group])]
    return [text for turn in itertools.zip_longest(*shelf) for text in turn if text is not None][:samples]


def unanswered(source: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> float:
    """Return the share of a file's or data set's records that the model has to answer, from a few of them."""
    looked_at = [document.answer is None for document in itertools.islice(_documents(source, tokenizer, seed), SPREAD)]
    return sum(looked_at) / max(1, len(looked_at))


def _check_found(source: str, documents: int, texts: int, samples: int) -> None:
    if not documents:
        raise ValueError(
            f"{source} has no usable text: expected documents of at least {SHORTEST} tokens, found none. Give another file or "
            f'data set, or "self".'
        )
    if documents < DOCUMENTS:
        raise ValueError(
            f"{source} has {documents} usable documents; at least {DOCUMENTS} are needed, because some are held out to "
            f'measure on. Give more, or "self".'
        )
    if texts < samples:
        logger.warning("%s: there is room for %d texts and it has %d. All are used.", source, samples, texts)


def _pieces(document: Document, tokenizer: PreTrainedTokenizerBase, longest: int, group: int) -> list[Text]:
    """Return a document as tokens, cut into pieces, without those that are too short or have no counted token."""
    ids = _ids(document.prompt + (document.answer or ""), tokenizer, document.templated)
    # the common prefix: a token may span the border
    start = _agree(ids, _ids(document.prompt, tokenizer, document.templated))
    pieces = [Text(ids[at : at + longest], max(1, start - at), group) for at in range(0, len(ids), longest)]
    return [piece for piece in pieces if len(piece.ids) >= SHORTEST and piece.start < len(piece.ids)]


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, templated: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"])


def _agree(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _documents(source: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> Iterable[Document]:
    path = Path(source).expanduser()
    if not source.endswith((".txt", ".jsonl")) and not path.is_file():
        records = enumerate(_hub_records(source), 1)
        return (_document(record, tokenizer, f"{source}, record {number}") for number, record in records)
    if not path.is_file():
        raise FileNotFoundError(f'there is no file {path}. Give the path of a .txt or .jsonl file, a data set, or "self".')
    documents = list(_json_lines(path, tokenizer) if path.suffix.startswith(".json") else _paragraphs(path))
    random.Random(seed).shuffle(documents)
    return documents


def _paragraphs(path: Path) -> Iterator[Document]:
    """Yield the documents between blank lines."""
    for blank, lines in itertools.groupby((line for _, line in _lines(path)), key=lambda line: not line.strip()):
        if not blank:
            yield Document("", "\n".join(lines))


def _json_lines(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{where} is not JSON ({problem}). Expected an object with {ACCEPTED}.") from problem
        yield _document(record, tokenizer, where)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(tqdm(file, desc=f"reading {path.name}", unit="line"), 1):
            try:
                text = line.decode("utf-8-sig")
            except UnicodeDecodeError as problem:
                raise ValueError(f"{path}, line {number} is not UTF-8 text ({problem}). Save the file as UTF-8.") from problem
            yield number, text.rstrip("\r\n")


def _hub_records(source: str) -> Iterator[Any]:
    """Yield the records of a data set in order, streamed."""
    parts = source.split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(f'a data set is "name", "name:config" or "name:config:split", found {source!r}.')
    name, config, split = parts + [""] * (3 - len(parts))
    if name == "wikitext":
        name, config = WIKITEXT[0], config or WIKITEXT[1]
    check_datasets(source)
    from datasets import load_dataset

    if (trouble := hub_trouble()) is not None:
        raise OSError(
            f"the data set {name} cannot be loaded: the hub cannot be reached ({trouble}). Give the path of a .txt or .jsonl "
            f'file, or "self".'
        )
    try:
        yield from load_dataset(name, config or None, split=split or "train", streaming=True)
    except Exception as problem:  # any error may occur on the way to the hub
        raise OSError(
            f"the data set {name} (config {config or None}, split {split or 'train'}) cannot be loaded: "
            f'{type(problem).__name__}: {problem}. Give the path of a .txt or .jsonl file, or "self".'
        ) from problem


def _document(record: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Document:
    """Read a record by the first of its keys that is known. None counts as absent."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} should be an object with {ACCEPTED}, found {type(record).__name__}.")
    has = {key: value for key, value in record.items() if value is not None}
    answer = next((key for key in ANSWERS if key in has), None)
    if "text" in has:
        return Document("", _words(has, "text", where))
    if "prompt" in has and answer:
        return _pair(_words(has, "prompt", where), _words(has, answer, where), tokenizer, where)
    if "messages" in has:
        return _chat(has["messages"], tokenizer, where)
    if "question" in has and "answer" in has:
        return _pair(_words(has, "question", where), _words(has, "answer", where), tokenizer, where)
    if "turns" in has:
        turns = has["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f'{where}: "turns" should be a list of what the user says, found {turns!r:.80}.')
        return Document(turns[0], None)
    for key in ("prompt", "question"):
        if key in has:
            return Document(_words(has, key, where), None)
    raise ValueError(f"{where} has the keys {sorted(has)}; expected {ACCEPTED}.")


def _words(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f'{where}: "{key}" should be a string, found {type(record[key]).__name__}.')
    return str(record[key])


def _pair(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase, where: str) -> Document:
    """Return a prompt and its answer: as a chat if the tokenizer has a template, otherwise as a text."""
    if tokenizer.chat_template is not None:
        return _chat([{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], tokenizer, where)
    apart = prompt[-1:].isspace() or answer[:1].isspace()
    return Document(prompt, answer if apart else "\n" + answer)


def _chat(messages: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Document:
    """Return a chat up to the assistant's last answer; the first user message if there is no answer."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages):
        raise ValueError(f'{where}: "messages" should be a list of objects with "role" and "content", found {messages!r:.80}.')
    roles = [message.get("role") for message in messages]
    if "user" not in roles:
        raise ValueError(f'{where}: "messages" should have one of the role "user", found the roles {roles}.')
    last = max((place for place, role in enumerate(roles) if role == "assistant"), default=-1)
    if last < roles.index("user"):
        return Document(messages[roles.index("user")]["content"], None)
    if tokenizer.chat_template is None:
        raise ValueError(
            f'{where} has "messages", and the tokenizer has no chat template to write them with. Use a file with "text", or '
            f'with "prompt" and "response", or set tokenizer.chat_template.'
        )
    try:
        whole = str(tokenizer.apply_chat_template(messages[: last + 1], tokenize=False)).rstrip()
        before = str(tokenizer.apply_chat_template(messages[:last], add_generation_prompt=True, tokenize=False))
    except Exception as problem:  # templates may raise anything
        raise ValueError(f"{where}: the chat template refuses messages with the roles {roles}: {problem}") from problem
    cut = _agree(whole, before)
    return Document(whole[:cut], whole[cut:], templated=True)
