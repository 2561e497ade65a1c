from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from families import build


@pytest.fixture
def folder(tmp_path):
    """A tiny model on disk, as a user would have one."""
    from tokenizers import Tokenizer, models

    build("llama").save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 5}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>").save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"
