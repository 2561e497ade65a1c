"""A model and a tokenizer small enough to read: a token is a character."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from families import VOCAB

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<bot>"]
TEMPLATE = (
    "<s>{% for m in messages %}{{ '<user>' if m['role'] == 'user' else '<bot>' }}{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def characters(template: str | None) -> PreTrainedTokenizerFast:
    known = [*SPECIAL, "\n", *map(chr, range(32, 127))]
    known += [f"[{number}]" for number in range(len(known), VOCAB)]  # so that all the model writes can be read
    core = Tokenizer(models.WordLevel({token: place for place, token in enumerate(known)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<user>", "<bot>"],
        chat_template=template,
    )
