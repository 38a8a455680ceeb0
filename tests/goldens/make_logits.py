"""Writes logits.npz: small random models of every family with the logits transformers gives.

Needs torch, which neither the trainer nor its tests do:

    python3 -m venv /tmp/torchenv
    /tmp/torchenv/bin/pip install torch transformers safetensors numpy
    /tmp/torchenv/bin/python tests/goldens/make_logits.py

Weights are drawn large, so that attention is sharp and a wrong angle, window or norm shows, and
rounded to what float16 holds, so that the file is small and says the same to both libraries. Read
by `tests/support/checkpoints.py`, which says what each entry is.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PLACE = Path(__file__).parent / "logits.npz"
TOKENS = 40  # of each sequence
POSITIONS = (0, 1, 7, 13, 22, 31, 39)  # whose logits are kept


def rope(kind: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


# (class of the config, what it is made of); every sequence is longer than each window and than
# each original length.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-tied": ("Qwen2", dict(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, rms_norm_eps=1e-3, tie_word_embeddings=True,
        **rope("default", 1e6))),
    "qwen2-untied": ("Qwen2", dict(
        vocab_size=101, hidden_size=30, num_hidden_layers=2, num_attention_heads=5,
        num_key_value_heads=1, intermediate_size=33, rms_norm_eps=1e-6, tie_word_embeddings=False,
        **rope("default"))),
    "qwen2-window": ("Qwen2", dict(
        vocab_size=37, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=21, rms_norm_eps=1e-6, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=5, max_window_layers=1, **rope("default"))),
    "qwen2-yarn": ("Qwen2", dict(
        vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=36, rms_norm_eps=1e-6, tie_word_embeddings=False,
        max_position_embeddings=64,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0))),
    "qwen2-yarn-factors": ("Qwen2", dict(
        vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=36, rms_norm_eps=1e-6, tie_word_embeddings=True,
        max_position_embeddings=64,
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
               mscale=1.3, mscale_all_dim=0.7, truncate=False))),
    "qwen3": ("Qwen3", dict(
        vocab_size=37, hidden_size=22, num_hidden_layers=2, num_attention_heads=4, head_dim=10,
        num_key_value_heads=1, intermediate_size=35, rms_norm_eps=1e-4, tie_word_embeddings=True,
        **rope("default", 1e6))),
    "qwen3-untied": ("Qwen3", dict(
        vocab_size=101, hidden_size=20, num_hidden_layers=2, num_attention_heads=3, head_dim=8,
        num_key_value_heads=3, intermediate_size=35, rms_norm_eps=1e-6, tie_word_embeddings=False,
        **rope("default"))),
    "llama": ("Llama", dict(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=40, rms_norm_eps=1e-5, tie_word_embeddings=False,
        **rope("default", 5e5))),
    "llama-llama3": ("Llama", dict(
        vocab_size=37, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=29, rms_norm_eps=1e-5, tie_word_embeddings=True,
        max_position_embeddings=128,
        **rope("llama3", 1e3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=16))),
    "llama-linear": ("Llama", dict(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, intermediate_size=29, rms_norm_eps=1e-6, tie_word_embeddings=True,
        max_position_embeddings=64, **rope("linear", factor=2.5))),
    "mistral-window": ("Mistral", dict(
        vocab_size=37, hidden_size=18, num_hidden_layers=2, num_attention_heads=4, head_dim=6,
        num_key_value_heads=2, intermediate_size=40, rms_norm_eps=1e-5, tie_word_embeddings=False,
        sliding_window=7, **rope("default"))),
}  # fmt: skip


def randomise(net: torch.nn.Module, generator: torch.Generator) -> None:
    """Fills the parameters: norms about 1, biases about 0, matrices by their width."""
    for name, value in net.named_parameters():
        drawn = torch.randn(value.shape, generator=generator)
        if value.ndim == 1:
            drawn = 0.5 * drawn if name.endswith("bias") else 1 + 0.3 * drawn
        elif "embed_tokens" in name:
            drawn = 0.5 * drawn
        else:
            gain = 1.8 if "q_proj" in name or "k_proj" in name else 1.2
            drawn = gain * drawn / value.shape[1] ** 0.5
        with torch.no_grad():
            value.copy_(drawn.half().float())


def main() -> None:
    out: dict[str, np.ndarray] = {}
    for seed, (family, (kind, options)) in enumerate(FAMILIES.items()):
        generator = torch.Generator().manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**options, attn_implementation="eager")
        net = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        net = net.float().eval()
        randomise(net, generator)
        tokens = torch.randint(0, config.vocab_size, (1, TOKENS), generator=generator)
        with torch.no_grad():
            logits = net(tokens).logits[0, list(POSITIONS)].numpy()
        with tempfile.TemporaryDirectory() as place:
            net.save_pretrained(place)
            text = (Path(place) / "config.json").read_text()
            held = transformers.AutoModelForCausalLM.from_pretrained(place)
            assert all((a == b).all() for a, b in zip(net.parameters(), held.parameters()))
        # What save_pretrained puts into the file: a tied head has no entry of its own.
        weights = {name: value.detach().numpy() for name, value in net.named_parameters()}
        out |= {
            f"{family}.config": np.array(json.dumps(json.loads(text))),
            f"{family}.shapes": np.array(json.dumps({n: v.shape for n, v in weights.items()})),
            f"{family}.weights": np.concatenate([v.ravel() for v in weights.values()]).astype(
                np.float16
            ),
            f"{family}.tokens": tokens[0].numpy().astype(np.int16),
            f"{family}.positions": np.array(POSITIONS, np.int16),
            f"{family}.logits": logits,
        }
        print(
            f"{family}: {sum(v.size for v in weights.values())} weights, "
            f"logits of standard deviation {logits.std():.2f}"
        )
    out["version"] = np.array(f"transformers {transformers.__version__}, torch {torch.__version__}")
    np.savez_compressed(PLACE, **out)
    print(f"{PLACE}: {PLACE.stat().st_size} bytes, {out['version']}")


if __name__ == "__main__":
    main()
