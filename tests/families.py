"""Tiny random models of every family, made from a config: no network, a few milliseconds each.

Weights are drawn wide enough that layers matter and the best token changes from place to place, and heads are not tied
to the embedding, because a random model with a tied head repeats its input: it would agree with itself whatever one skips.
"""

from __future__ import annotations

import copy
import math

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCAB, LAYERS, CONTEXT = 128, 4, 256
SPECIAL = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
WIDE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    **SPECIAL,
)
GPT = dict(vocab_size=VOCAB, n_embd=64, n_layer=LAYERS, n_head=4, n_positions=CONTEXT, **SPECIAL)
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)
GROUPED = dict(n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32)
GEMMA4 = dict(
    head_dim=16,
    global_head_dim=16,
    sliding_window=8,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    num_global_key_value_heads=2,
)

# one of each way in which layers differ; other families differ in norms, biases and sizes
KINDS = {
    "llama": "rotary angles, norms before, a gated MLP",
    "qwen2-sliding": "windows that slide",
    "gemma2": "norms after too, capped logits",
    "gemma4-shared": "K/V of another layer, embeddings in every layer",
    "llama4": "chunks, layers without angles, experts in some",
    "gpt2": "learned positions, Conv1D",
    "bloom": "ALiBi",
    "phi": "attention and MLP side by side, angles of a part",
    "mixtral": "experts",
    "deepseek_v3": "K/V of low rank",
    "qwen3_next": "a running state",
    "lfm2": "convolutions",
}

# name -> (config class, what differs from the base of its kind)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "llama4": (
        "Llama4TextConfig",
        dict(
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=8,
            moe_layers=[1, 3],
            no_rope_layers=[1, 1, 1, 0],
            attn_temperature_tuning=True,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(
            GROUPED,
            num_key_value_heads=4,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_shared_experts=1,
        ),
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=8, max_window_layers=2)),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=16, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2)),
    "qwen3_next": (
        "Qwen3NextConfig",
        dict(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", FULL, "linear_attention", FULL],
        ),
    ),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", FULL, "conv", FULL], block_multiple_of=16)),
    "mistral": ("MistralConfig", dict(sliding_window=8)),
    "ministral3": ("Ministral3Config", dict(head_dim=16)),
    "mixtral": ("MixtralConfig", EXPERTS),
    "minimax_m2": ("MiniMaxM2Config", dict(EXPERTS, head_dim=16, rotary_dim=8)),
    "gpt_oss": ("GptOssConfig", dict(EXPERTS, head_dim=16, sliding_window=8)),
    "gemma": ("GemmaConfig", dict(head_dim=16)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=8, final_logit_softcapping=5.0)),
    "gemma3": (
        "Gemma3TextConfig",
        dict(head_dim=16, sliding_window=8, final_logit_softcapping=5.0, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
    ),
    "gemma4": (
        "Gemma4TextConfig",
        dict(GEMMA4, final_logit_softcapping=5.0, num_kv_shared_layers=0, layer_types=[SLIDING, FULL] * 2),
    ),
    "gemma4-shared": (
        "Gemma4TextConfig",
        dict(GEMMA4, num_hidden_layers=6, num_kv_shared_layers=2, layer_types=[SLIDING, FULL] * 3),
    ),
    "gpt2": ("GPT2Config", GPT),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gptj": ("GPTJConfig", dict(GPT, rotary_dim=8)),
    "gpt_bigcode": ("GPTBigCodeConfig", dict(GPT, n_inner=96)),
    "gpt_neo": (
        "GPTNeoConfig",
        dict(
            SPECIAL,
            vocab_size=VOCAB,
            hidden_size=64,
            num_layers=LAYERS,
            num_heads=4,
            window_size=8,
            max_position_embeddings=CONTEXT,
            attention_types=[[["global", "local"], 2]],
        ),
    ),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phi3-sliding": ("Phi3Config", dict(sliding_window=8)),
    "falcon": ("FalconConfig", dict(new_decoder_architecture=False, multi_query=True)),
    "falcon-new": ("FalconConfig", dict(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon-alibi": ("FalconConfig", dict(alibi=True, multi_query=False)),
    "opt": ("OPTConfig", dict(ffn_dim=96, word_embed_proj_dim=64)),
    "opt-projected": ("OPTConfig", dict(ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False)),
    "bloom": ("BloomConfig", dict(SPECIAL, vocab_size=VOCAB, hidden_size=64, n_layer=LAYERS, n_head=4)),
    "mpt": ("MptConfig", dict(SPECIAL, vocab_size=VOCAB, d_model=64, n_layers=LAYERS, n_heads=4, max_seq_len=CONTEXT)),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", dict(sliding_window=8)),
    "smollm3": ("SmolLM3Config", {}),
    "cohere": ("CohereConfig", dict(logit_scale=0.25)),
    "cohere2": ("Cohere2Config", dict(logit_scale=0.25, sliding_window=8)),
    "granite": (
        "GraniteConfig",
        dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2),
    ),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", dict(sliding_window=8)),
    "nemotron": ("NemotronConfig", {}),
    "exaone4": ("Exaone4Config", dict(sliding_window=8, sliding_window_pattern=2)),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "glm4_moe": ("Glm4MoeConfig", dict(GROUPED, head_dim=16)),
}

# those whose layers there is compiled code for
COMPILED = ["gemma", "gemma2", "gemma3", "granite", "llama", "mistral", "olmo", "olmo2", "olmo3", "phi", "phi3", "phi3-sliding"]
COMPILED += ["qwen2", "qwen2-sliding", "qwen3", "smollm3", "stablelm", "starcoder2"]


def build(name: str, **changes: object) -> PreTrainedModel:
    """A tiny model of a family, in eval mode and fp32, the same each time."""
    cls, own = FAMILIES[name]
    own_sizes = {"n_layer", "n_layers", "num_layers"} & set(own)
    base = {"tie_word_embeddings": False, **({} if own_sizes else WIDE)}
    config = getattr(transformers, cls)(**copy.deepcopy({**base, **own, **changes}))
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError:  # a family without this attention
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return enliven(model.float().eval())


@torch.no_grad()
def enliven(model: PreTrainedModel) -> PreTrainedModel:
    """Redraw the weights so that depth changes predictions."""
    generator = torch.Generator().manual_seed(1)
    embeddings = {id(model.get_input_embeddings().weight)}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            scale = 0.5 if id(parameter) in embeddings else 0.6 / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        elif "bias" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
