"""GGUF files of tiny models, as llama.cpp would have them."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A Llama, its matrices in 8 bits."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokenizer.convert_ids_to_tokens(range(config.vocab_size - 2)), "ab", "ba"])
    writer.add_token_merges(["a b", "b a"])  # transformers 5.17 does not read a single one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        values, matrix = tensor.float().numpy(), tensor.ndim == 2
        kind = gguf.GGMLQuantizationType.Q8_0 if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in AROUND:
        return f"{AROUND[module]}.weight"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"
