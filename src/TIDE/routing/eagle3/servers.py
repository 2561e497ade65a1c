"""Servers and the models that they run with an EAGLE-3 head: those whose classes hand out states for it.

Read in vLLM at a014e35f38c and in SGLang at cce0a1244b5, both of August 2026: a class of vLLM declares SupportsEagle3, one of
SGLang has set_eagle3_layers_to_capture. Without them a server stops with an error when it is given a head.
"""

from __future__ import annotations

READ = "August 2026"
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
BOTH = (
    "ApertusForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)
ONLY = {
    "vllm": (
        "ArceeForCausalLM",
        "Ernie4_5ForCausalLM",
        "GlmForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        # these four are run by its Transformers backend
        "Olmo2ForCausalLM",
        "OlmoForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    ),
    "sglang": (
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Qwen2MoeForCausalLM",
    ),
}
NEITHER = (
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Exaone4ForCausalLM",
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GraniteForCausalLM",
    "Lfm2ForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "PhiForCausalLM",
    "SeedOssForCausalLM",
    "SolarForCausalLM",
    "StableLmForCausalLM",
)


def takes(server: str, architecture: str) -> bool | None:
    """Return True if a server runs models of a class with an EAGLE-3 head; None: not known."""
    if architecture in BOTH or architecture in ONLY[server]:
        return True
    refused = architecture in NEITHER or any(architecture in own for own in ONLY.values())
    return False if refused else None
