"""DAPO on Qwen2.5-7B, with the data and the objective of the published 32B run.

Command:   python launch/train.py --config=configs/qwen7b_dapo.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen7b_dapo.py --dry_run
Hardware:  laid out for 8 TPU v5p chips (2x2x2). Not yet run. The plan runs anywhere.

What is not set here is as in qwen32b_dapo. Responses are shorter and the batch a quarter, so that a
step of the smaller model stays short; both are ours, not the paper's.
"""

from ml_collections import ConfigDict

from configs import qwen32b_dapo


def get_config() -> ConfigDict:
    """qwen32b_dapo with a model of 7.6 billion parameters and 8,192-token responses."""
    config = qwen32b_dapo.get_config()
    name = "Qwen/Qwen2.5-7B"  # sizes: its config.json
    config.model.update(path=name, tokenizer=name, num_layers=28, hidden_size=3584, num_heads=28)
    config.model.update(num_kv_heads=4, intermediate_size=18_944, rms_norm_eps=1e-6)
    config.rollout.slots = 512
    smaller(config)
    return config


def smaller(config: ConfigDict) -> None:
    """Mesh, lengths and batch for models of 7 to 8 billion parameters."""
    config.mesh.update(fsdp=8, tensor=1)
    config.rollout.update(max_response_tokens=8192, cache_gib=None)
    config.reward.update(overlong_buffer_tokens=2048, workers=32)
    config.dynamic_sampling.max_prompts = 3840
    config.train.update(num_steps=400, prompts_per_step=128)
    config.train.update(row_tokens=10_240, rows_per_micro_batch=8)
