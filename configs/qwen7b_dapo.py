"""DAPO on Qwen2.5-7B, with the data and the objective of the published 32B run.

Command:   python launch/train.py --config=configs/qwen7b_dapo.py
Plan only: python launch/train.py --config=configs/qwen7b_dapo.py --dry_run
Hardware:  laid out for 8 TPU v5p chips (2x2x2). Not yet run. The plan runs anywhere.

Everything else is as in qwen32b_dapo. Shorter responses and a quarter of the batch are ours: a step
of the smaller model stays short.
"""

from ml_collections import ConfigDict

from configs import qwen32b_dapo

NAME = "Qwen/Qwen2.5-7B"


def get_config() -> ConfigDict:
    """Returns qwen32b_dapo with a model of 7.6 billion parameters and 8,192-token responses."""
    c = qwen32b_dapo.get_config()
    c.model.update(path=NAME, tokenizer=NAME, num_layers=28, hidden_size=3584, num_heads=28)
    c.model.update(num_kv_heads=4, intermediate_size=18_944, rms_norm_eps=1e-6)
    c.rollout.slots = 512
    shrink(c)
    return c


def shrink(c: ConfigDict) -> None:
    """Sets mesh, lengths and batch for models of 7 to 8 billion parameters."""
    c.mesh.update(fsdp=8, tensor=1)
    c.rollout.update(max_response_tokens=8192, cache_gib=None)
    c.reward.update(overlong_buffer_tokens=2048, workers=32)
    c.dynamic_sampling.max_prompts = 3840
    c.train.update(num_steps=400, prompts_per_step=128, row_tokens=10_240, rows_per_micro_batch=8)
