"""DAPO on Qwen2.5-0.5B-Instruct and GSM8K: a real model on one accelerator.

Command:   python launch/train.py --config=configs/qwen0_5b_gsm8k.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen0_5b_gsm8k.py --dry_run --config.mesh.fsdp=1
Hardware:  one GPU of 24 GB or more, or one TPU v5e or later. Not yet run; compiled for one v5e it
           takes 14.91 of 15.75 GiB (launch/plan.py --config=... --topology=v5e:1x1).

What is not set here is as in qwen32b_dapo.
"""

import ml_collections

from configs import gsm8k_random, qwen32b_dapo


def get_config() -> ml_collections.ConfigDict:
    """qwen32b_dapo with a model of 0.5 billion parameters, 512-token responses and GSM8K."""
    config = qwen32b_dapo.get_config()
    name = "Qwen/Qwen2.5-0.5B-Instruct"  # sizes: its config.json
    config.model.path = config.model.tokenizer = name
    config.model.vocab_size = 151_936
    config.model.num_layers = 24
    config.model.width = 896
    config.model.num_heads = 14
    config.model.num_kv_heads = 2
    config.model.head_dim = 64
    config.model.ff_width = 4864
    config.model.rms_norm_eps = 1e-6
    config.model.tie_embeddings = True
    config.model.stop_token_ids = (151_645, 151_643)  # its generation_config.json
    config.mesh.fsdp, config.mesh.tensor = -1, 1
    for side, name, split in (("train", "dapo", "train"), ("heldout", "aime24", "test")):
        source = config.data[side][name]
        del config.data[side][name]
        source.path, source.split = "gsm8k", split
        config.data[side].gsm8k = source
    config.data.prompt_template = gsm8k_random.PROMPT_TEMPLATE
    config.data.max_prompt_tokens = 512
    config.rollout.group_size = 8
    config.rollout.max_response_tokens = 512
    config.rollout.slots = 128  # XLA's attention for heads of 64 has a copy of the cache
    config.rollout.cache_gib = ml_collections.config_dict.placeholder(float)
    config.reward.scorer = "gsm8k"
    config.reward.overlong_buffer_tokens = 128
    config.reward.workers = 8
    config.dynamic_sampling.max_round_prompts = 256
    config.optimizer.warmup_steps = 5
    config.train.prompts_per_step = 128
    config.train.row_tokens = 2048
    config.train.rows_per_micro_batch = 8
    config.train.num_steps = 100
    config.evaluation.every_steps = 10
    config.evaluation.num_samples = 1
    config.evaluation.temperature, config.evaluation.top_p = 0.0, 1.0
    config.checkpoint.every_steps = 10
    return config
