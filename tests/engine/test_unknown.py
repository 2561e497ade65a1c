"""Models that are not in the table: run exactly if a few tokens say so, refused with the layer and the reason if not."""

from __future__ import annotations

import pytest
import torch
import transformers

from families import SPECIAL, VOCAB, WIDE, enliven
from policies import Everyone, Knowing, texts_of
from TIDE import TIDE, TIDEConfig
from TIDE.engine.check import check_unknown

VISION = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
MAMBA = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)
HEADS = dict(encoder_layers=4, decoder_layers=4, d_model=64, encoder_ffn_dim=64, decoder_ffn_dim=64)


def make(name: str, config: str, **changes):
    """A tiny lively model with an untied head: a tied one repeats its prompt and hides mistakes."""
    torch.manual_seed(0)
    settings = getattr(transformers, config)(**{**WIDE, "tie_word_embeddings": False, **changes})
    return enliven(getattr(transformers, name)(settings).float().eval())


RUN = {
    "arcee": lambda: make("ArceeForCausalLM", "ArceeConfig"),
    "bamba": lambda: make(
        "BambaForCausalLM", "BambaConfig", attn_layer_indices=[1, 3], mamba_n_heads=4, mamba_d_head=32, **MAMBA
    ),
    "gemma3 with images": lambda: make(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        text_config=dict(WIDE, head_dim=16, sliding_window=8),
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=126,
        eoi_token_index=125,
    ),
}


@pytest.mark.parametrize("name", RUN)
def test_unknown_models_that_pass_the_check_write_what_generate_writes(name, prompts):
    ids, mask = prompts
    ids, model = ids.clamp(max=120), RUN[name]()
    options = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    for rows in (slice(0, 3), slice(2, 3)):
        expected = model.generate(ids[rows], attention_mask=mask[rows], **options)
        texts = texts_of(expected, mask[rows])
        for policy in (None, Everyone(0, 2), Knowing(texts, (1, 2, 3), seed=1, leaves=0.7, right=0.7)):
            with TIDE(model, policy, TIDEConfig(compaction_threshold=1.0)) as engine:
                assert not engine.adapter.is_known
                assert torch.equal(engine.generate(ids[rows], attention_mask=mask[rows], **options), expected)
    model(ids[2:], labels=ids[2:]).loss.backward()


REFUSED = {
    r"its layer 2 \(JambaMambaDecoderLayer\) gives other states when tokens are caught up": lambda: make(
        "JambaForCausalLM",
        "JambaConfig",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        **MAMBA,
    ),
    r"its layer 0 \(BartDecoderLayer\) gives other states .* or takes positions from the cache": lambda: make(
        "BartForCausalLM", "BartConfig", is_decoder=True, is_encoder_decoder=False, **HEADS
    ),
    "OpenAIGPTLMHeadModel keeps no K/V cache": lambda: enliven(
        transformers.OpenAIGPTLMHeadModel(
            transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=64, n_layer=4, n_head=4, n_positions=64)
        ).eval()
    ),
    "MambaForCausalLM keeps no K/V cache": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, **SPECIAL)
    ).eval(),
}


@pytest.mark.invariant(10)
@pytest.mark.parametrize("message", REFUSED)
def test_unknown_models_that_fail_the_check_are_refused_and_left_as_they_were(message, prompts):
    model = REFUSED[message]()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"(?s){message}.*Run it with model.generate"):
        TIDE(model)
    assert [type(module) for module in model.modules()] == before
    model(prompts[0][:, -4:])


def test_a_model_that_cannot_be_run_in_spans_is_refused_with_what_happened(monkeypatch):
    model = make("ArceeForCausalLM", "ArceeConfig")

    def broken(*_args, **_kwargs):
        raise RuntimeError("its own cache only")

    monkeypatch.setattr("TIDE.engine.cache.segment_cache.SegmentCache.update", broken)
    with pytest.raises(ValueError, match=r"cannot run its layers one span at a time \(RuntimeError: its own cache only\)"):
        TIDE(model)


def test_the_check_passes_every_known_family(each_kind):
    with TIDE(each_kind) as engine:
        check_unknown(engine.adapter)
