"""DAPO on Qwen2.5-0.5B-Instruct and GSM8K: a real model on one accelerator.

Command:   python launch/train.py --config=configs/qwen0_5b_gsm8k.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen0_5b_gsm8k.py --dry_run --config.mesh.fsdp=1
Hardware:  one GPU of 24 GB or more, or one TPU v5e or later. Not yet run; compiled for one v5e it
           takes 14.91 of 15.75 GiB (launch/plan.py --config=... --topology=v5e:1x1).

What is not set here is as in qwen32b_dapo.
"""

from ml_collections import ConfigDict

from configs import gsm8k_random, qwen32b_dapo


def get_config() -> ConfigDict:
    """qwen32b_dapo with a model of 0.5 billion parameters, 512-token responses and GSM8K."""
    config = qwen32b_dapo.get_config()
    name = "Qwen/Qwen2.5-0.5B-Instruct"  # sizes: its config.json and generation_config.json
    config.model.update(
        path=name, tokenizer=name, vocab_size=151_936, num_layers=24, hidden_size=896
    )
    config.model.update(num_heads=14, num_kv_heads=2, head_dim=64, intermediate_size=4864)
    config.model.update(rms_norm_eps=1e-6, tie_embeddings=True)
    config.model.stop_token_ids = (151_645, 151_643)
    config.mesh.update(fsdp=-1, tensor=1)
    config.data = dict(
        train=dict(gsm8k=dict(path="gsm8k", split="train", weight=1.0)),
        heldout=dict(gsm8k=dict(path="gsm8k", split="test")),
        prompt_template=gsm8k_random.PROMPT_TEMPLATE,
        max_prompt_tokens=512,
    )
    config.rollout.update(group_size=8, max_response_tokens=512, cache_gib=None)
    config.rollout.slots = 128  # XLA's attention for heads of 64 has a copy of the cache
    config.reward.update(scorer="gsm8k", overlong_buffer_tokens=128, workers=8)
    config.dynamic_sampling.max_prompts = 2560
    config.optimizer.warmup_steps = 5
    config.train.update(num_steps=100, prompts_per_step=128)
    config.train.update(row_tokens=2048, rows_per_micro_batch=8)
    config.evaluation.update(every_steps=10, num_samples=1, temperature=0.0, top_p=1.0)
    return config
