"""Heads of the package speculators, in an environment that has it (0.9.0, torch 2.13.0, transformers 5.19.0).

python speculators_head.py make DIR     write a small head with its package, and beside it the logits it gives
python speculators_head.py check DIR    print the logits of an exported head as safetensors: DIR/theirs.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

STEPS = 3


def make(folder: Path) -> None:
    """Write a head of EAGLE-3.1 with a draft vocabulary."""
    torch.manual_seed(0)
    block = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=block,
        draft_vocab_size=48,
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    block._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config).float().eval()
    for weight in model.parameters():
        weight.data = (
            1 + torch.randn(weight.shape) / 4 if weight.ndim == 1 else torch.randn(weight.shape) / weight.shape[1] ** 0.5
        )
    ids = torch.randperm(96)[:48].sort().values
    mask = torch.zeros(96, dtype=torch.bool)
    mask[ids] = True
    model.load_vocab_mappings(mask, ids - torch.arange(48))
    model.save_pretrained(folder)
    given = {"ids": torch.randint(0, 96, (1, 10)), "states": torch.randn(1, 10, 96) * 3}
    save_file(given | logits(model, given), folder.with_name(f"{folder.name}-logits.safetensors"))
    (folder / "config.py").unlink()  # a copy of their code


def logits(model: Eagle3DraftModel, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the logits of drafts 1, 2, 3 at every position; position i has the states of token i and the id of the next."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output.detach()))
    with torch.no_grad():
        model(given["states"], given["ids"], torch.zeros_like(given["ids"]), ttt_steps=STEPS)
    hook.remove()
    return {f"logits.{step}": one.contiguous() for step, one in enumerate(found)}


def check(folder: Path) -> None:
    """Load a folder that TIDE exported and run what the file beside it says; write what comes out."""
    made = Eagle3SpeculatorConfig.from_pretrained(folder)
    made.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel.from_pretrained(folder, config=made).float().eval()
    table = load_file(folder.with_name("model") / "model.safetensors")["model.embed_tokens.weight"]
    model.embed_tokens.weight.data = table  # 0.9.0 leaves an embedding that a file lacks uninitialized
    given = folder.with_name(f"{folder.name}-given.safetensors")
    save_file(logits(model, load_file(given)), folder.with_name(f"{folder.name}-logits.safetensors"))


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]))
