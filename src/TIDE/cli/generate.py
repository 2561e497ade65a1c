"""`tide generate`: answer prompts, streaming the text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.answer import finish_reason, record, tell_if_cut, write
from TIDE.cli.colours import Pieces
from TIDE.cli.errors import WrongUsage
from TIDE.cli.files import PromptFile, check_json, decoded
from TIDE.cli.model import ModelOption, load_quietly
from TIDE.cli.options import flag, option
from TIDE.cli.router import NoExits, Router, exits_or_off
from TIDE.cli.sampling import Sampling, System, with_sampling
from TIDE.cli.settings import RUNNING, with_settings
from TIDE.config import TIDEConfig
from TIDE.run import prepared


@with_settings(*RUNNING)
@with_sampling(max_new_tokens=128, seed=0)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; '-' or none: standard input, as one prompt.")
    ] = None,
    *,
    model: ModelOption = "default",
    file: PromptFile = None,
    router: Router = None,
    no_exits: NoExits = False,
    system: System = None,
    raw: Annotated[bool, flag("--raw", "Continue the prompt as it is, without the chat template.")] = False,
    depth: Annotated[bool, flag("--depth", "Colour each token by the depth at which it was decided.")] = False,
    save: Annotated[
        Path | None, option("FILE", "Save the run for tide report: a .json file; one prompt.", check=check_json)
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print a JSON object per prompt.")] = False,
    sampling: Sampling,
    config: TIDEConfig,
) -> None:
    """Answer prompts from arguments, a file or standard input.

    \b
    Examples:
      tide generate "Why is the sky blue?" --depth
      tide generate "Why is the sky blue?" --save run.json
      tide generate --file questions.txt --max-new-tokens 64 --json
      git diff | tide generate --system "Describe this change in a sentence."
    """
    asked = read_prompts(prompts or [], file)
    if save is not None and len(asked) > 1:
        raise WrongUsage(f"--save keeps one run, found {len(asked)} prompts. Ask one at a time.")
    if raw and system is not None:
        raise WrongUsage("--system goes into the chat template, which --raw leaves out. Leave one of them out.")
    source = exits_or_off(model, router, no_exits)
    loaded = load_quietly(model, source)

    import TIDE
    from TIDE.integrations.record import last_run

    with TIDE.TIDE(loaded.model, source, config) as engine:
        for prompt in asked:
            inputs = prepared(loaded.tokenizer, prompt, raw, system).to(loaded.model.device)
            pieces = Pieces(loaded.tokenizer, sampling.stop or ())
            write(engine, pieces, engine.stream(**inputs, **sampling.for_engine()), depth and not as_json, quiet=as_json)
            if as_json:
                typer.echo(json.dumps(record(engine, prompt, pieces)))
            else:
                more = "--max-new-tokens makes room for longer answers."
                tell_if_cut(finish_reason(engine, pieces), len(pieces.ids), sampling.max_new_tokens, more)
                typer.echo()
            if save is not None:
                last_run(engine, loaded.tokenizer, prompt, inputs["input_ids"], pieces.ids).save(save)
                typer.echo(f"written: {save}", err=True)


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Return the prompts: from arguments, from the lines of a file, or all of standard input as one."""
    if file is not None and given:
        raise WrongUsage("expected prompts as arguments or --file, found both. Leave one out.")
    if file is not None:
        return _from_lines(decoded(file.read_bytes(), str(file)), file.suffix == ".jsonl", str(file))
    if given and given != ["-"]:
        if not all(prompt.strip() for prompt in given):
            raise WrongUsage("expected prompts with words in them, found an empty one.")
        return given
    if not given and sys.stdin.isatty():
        raise WrongUsage('expected a prompt. Give one, such as tide generate "Hello", or --file, or pipe one in.')
    prompt = decoded(sys.stdin.buffer.read(), "standard input").rstrip("\r\n")
    if not prompt.strip():
        raise WrongUsage("expected a prompt in standard input, found none.")
    return [prompt]


def _from_lines(text: str, is_json: bool, name: str) -> list[str]:
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]  # JSON may hold other line ends
    if not lines:
        raise WrongUsage(f"expected a prompt per line in {name}, found none.")
    if not is_json:
        return lines
    found = [_asked(line) for line in lines]
    if None in found:
        number = found.index(None)
        raise WrongUsage(f"expected an object with 'prompt' or 'turns' a line in {name}, found {lines[number][:60]!r}.")
    return [prompt for prompt in found if prompt is not None]


def _asked(line: str) -> str | None:
    """Return the prompt in a line of JSON, or the first of its turns; None if it has neither."""
    try:
        held = json.loads(line)
    except ValueError:
        return None
    prompt = held.get("prompt") or (held.get("turns") or [None])[0] if isinstance(held, dict) else None
    return prompt if isinstance(prompt, str) else None
