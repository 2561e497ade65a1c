"""Prompts as they come in: token ids or embeddings, their mask, and the context they have to fit into.

    engine.generate(ids)    engine.generate(inputs=ids)    engine.generate(**encoding)    engine.generate(encoding)
    engine.generate(inputs_embeds=states, attention_mask=mask)

Everything here is looked at before transformers or the model see it, so that errors can say what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from TIDE.engine.rows.stop import Context

USE_GENERATE = "use model.generate for it"


def as_keywords(inputs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what was passed to `generate` as keywords, the prompt among them as `input_ids` where there are ids."""
    if options.get("streamer") is not None:
        raise ValueError("add and stream hand tokens over themselves, found a streamer. Use generate(..., streamer=...).")
    given = dict(inputs) if isinstance(inputs, Mapping) else {} if inputs is None else {"input_ids": inputs}
    if twice := sorted(name for name in given if options.get(name) is not None):
        raise TypeError(f"expected a prompt once, found {twice} twice. Pass it as the first argument or by name.")
    return {**options, **given}


def check_streamer(streamer: Any) -> None:
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise TypeError(
            f"a streamer has the methods put and end, found {type(streamer).__name__}. Use transformers.TextStreamer("
            f"tokenizer), or engine.stream(...), which yields tokens."
        )


@contextmanager
def beside_rounds(device: torch.device, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `options` with their tensors on the device. What comes from the host is moved to a GPU, and looked at there, on a
    stream of its own: on that of the rounds it would wait for the one in flight."""
    tensors = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    if device.type != "cuda" or not tensors or any(tensor.is_cuda for tensor in tensors.values()):
        yield options
        return
    aside = _stream(device)
    with torch.cuda.stream(aside):
        yield options | {name: tensor.to(device) for name, tensor in tensors.items()}
    torch.cuda.current_stream(device).wait_stream(aside)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def take_ids(model: PreTrainedModel, options: dict[str, Any], context: Context) -> torch.Tensor | None:
    """Take the token ids out of `options`, and check the prompt, which may also be embeddings. None: there are no ids."""
    ids, embeds = options.pop("input_ids", None), options.get("inputs_embeds")
    if ids is not None:
        ids = check_ids(model, ids)
    if embeds is not None:
        check_embeds(model, embeds, ids)
    prompt = ids if embeds is None else embeds
    if prompt is not None:
        padding = left_padding(options.get("attention_mask"), prompt.shape[:2])
        context.check(prompt.shape[1] - min(padding), room_for=1)
    return ids


def check_ids(model: PreTrainedModel, input_ids: Any) -> torch.Tensor:
    """Return (rows, columns) token ids, or raise an error that says what is wrong with them."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.long, torch.int):
        found = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise TypeError(
            f'expected input_ids as a tensor of token ids, found {found}. Use tokenizer(text, return_tensors="pt").'
        )
    if input_ids.is_meta:
        raise TypeError("expected input_ids with values, found some on the device meta, which have no values. Load them anew.")
    if input_ids.ndim != 2:
        raise ValueError(
            f"expected input_ids of shape (rows, tokens), found {tuple(input_ids.shape)}. Use input_ids[None] for one prompt."
        )
    if input_ids.numel() == 0:
        raise ValueError("the prompt is empty. Start from at least one token, such as tokenizer.bos_token_id.")
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", model.config.get_text_config(decoder=True).vocab_size)
    lowest, highest = (int(end) for end in input_ids.cpu().aminmax())
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(
            f"token ids must be from 0 to {vocabulary - 1} for this model, found {lowest} to {highest}. Does the tokenizer "
            f"belong to the model?"
        )
    return input_ids.long()


def check_embeds(model: PreTrainedModel, embeds: Any, ids: torch.Tensor | None) -> None:
    """Raise an error that says what is wrong with (rows, columns, hidden) embeddings of prompts, if anything is."""
    width = model.get_input_embeddings().weight.shape[-1]
    if not isinstance(embeds, torch.Tensor) or embeds.ndim != 3 or embeds.shape[-1] != width or not embeds.numel():
        found = tuple(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise ValueError(f"expected inputs_embeds of shape (rows, tokens, {width}), found {found}.")
    if getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None):
        raise ValueError(
            f"{type(model).__name__} looks up token ids in every layer, so it cannot start from inputs_embeds. Pass input_ids."
        )
    if ids is not None and ids.shape[1] and ids.shape != embeds.shape[:2]:
        raise ValueError(
            f"input_ids beside inputs_embeds must be of the same prompts, {tuple(embeds.shape[:2])}, found {tuple(ids.shape)}. "
            f"Pass both for the same tokens, or inputs_embeds alone."
        )


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return prompts as one batch."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(ids, dtype=torch.long, device=device),
        "attention_mask": torch.tensor(mask, dtype=torch.long, device=device),
    }


def left_padding(mask: torch.Tensor | None, shape: Sequence[int]) -> list[int]:
    """Return the columns of padding before each of (rows, columns) prompts; anything but left padding is refused."""
    rows, columns = shape
    if mask is None:
        return [0] * rows
    if tuple(mask.shape) != (rows, columns):
        raise ValueError(f"attention_mask must have the shape of input_ids, {(rows, columns)}, found {tuple(mask.shape)}.")
    mask = mask.bool().cpu()
    if not bool(mask.any(-1).all()):
        raise ValueError("a prompt is empty: its attention_mask is all zeros. Give every row at least one token.")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        _refuse_mask(mask)
    return (~mask).sum(-1).tolist()


def _refuse_mask(mask: torch.Tensor) -> None:
    """Say what is wrong with a mask that is not left padding: a hole in a prompt, or padding behind it."""
    for row, own in enumerate(mask):
        kept = own.nonzero()[:, 0]
        holes = [column for column in range(int(kept[0]), int(kept[-1])) if not own[column]]
        if holes:
            raise ValueError(
                f"attention_mask has a hole: row {row} is masked at column {holes[0]}, between tokens that are not. TIDE takes "
                f"prompts without gaps: leave those tokens out of input_ids, or {USE_GENERATE}. (Without an attention_mask, "
                f"transformers masks padding tokens wherever they stand: pass torch.ones_like(input_ids) if they are text.)"
            )
    raise ValueError("prompts must be padded on the left. Set tokenizer.padding_side = 'left'.")
