"""DAPO on Qwen2.5-7B, with the data and the objective of the published 32B run.

Command:   python launch/train.py --config=configs/qwen7b_dapo.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen7b_dapo.py --dry_run
Hardware:  laid out for 8 TPU v5p chips (2x2x2). Not yet run. The plan runs anywhere.

What is not set here is as in qwen32b_dapo. Responses are shorter and the batch a quarter, so that a
step of the smaller model stays short; both are ours, not the paper's.
"""

import ml_collections

from configs import qwen32b_dapo


def get_config() -> ml_collections.ConfigDict:
    """qwen32b_dapo with a model of 7.6 billion parameters and 8,192-token responses."""
    config = qwen32b_dapo.get_config()
    config.model.path = config.model.tokenizer = "Qwen/Qwen2.5-7B"  # sizes: its config.json
    config.model.num_layers = 28
    config.model.width = 3584
    config.model.num_heads = 28
    config.model.num_kv_heads = 4
    config.model.ff_width = 18_944
    config.model.rms_norm_eps = 1e-6
    config.rollout.slots = 512
    smaller(config)
    return config


def smaller(config: ml_collections.ConfigDict) -> None:
    """Mesh, lengths and batch for models of 7 to 8 billion parameters."""
    config.mesh.fsdp, config.mesh.tensor = 8, 1
    config.rollout.max_response_tokens = 8192
    config.rollout.cache_gib = ml_collections.config_dict.placeholder(float)
    config.reward.overlong_buffer_tokens = 2048
    config.dynamic_sampling.max_round_prompts = 384
    config.train.prompts_per_step = 128
    config.train.row_tokens = 10_240
    config.train.rows_per_micro_batch = 8
    config.train.num_steps = 400
    config.reward.workers = 32
