"""DAPO on Qwen3-8B-Base, with the data and the objective of the published 32B run.

Command:   python launch/train.py --config=configs/qwen3_8b_dapo.py
Plan only: python launch/train.py --config=configs/qwen3_8b_dapo.py --dry_run
Hardware:  laid out for 8 TPU v5p chips (2x2x2). Not yet run. The plan runs anywhere.

Everything else is as in qwen7b_dapo and qwen32b_dapo.
"""

from ml_collections import ConfigDict

from configs import qwen7b_dapo, qwen32b_dapo

NAME = "Qwen/Qwen3-8B-Base"


def get_config() -> ConfigDict:
    """Returns qwen32b_dapo at the sizes of Qwen3-8B-Base and with the batch of qwen7b_dapo; queries
    and keys have norms in the place of biases."""
    c = qwen32b_dapo.get_config()
    c.model.update(path=NAME, tokenizer=NAME, vocab_size=151_936, num_layers=36, hidden_size=4096)
    c.model.update(num_heads=32, num_kv_heads=8, intermediate_size=12_288, rms_norm_eps=1e-6)
    c.model.update(qkv_bias=False, qk_norm=True)
    c.rollout.slots = 288  # twice the heads of keys and values, and more layers
    qwen7b_dapo.shrink(c)
    return c
