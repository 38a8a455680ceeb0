"""DAPO on Qwen2.5-0.5B-Instruct and GSM8K: a real model on one accelerator.

Command:   python launch/train.py --config=configs/qwen0_5b_gsm8k.py
Plan only: python launch/train.py --config=configs/qwen0_5b_gsm8k.py --dry_run --config.mesh.fsdp=1
Hardware:  one GPU of 24 GB or more, or one TPU v5e or later. Not yet run; compiled for one v5e it
           takes 14.91 of 15.75 GiB (launch/plan.py --config=... --topology=v5e:1x1).

Everything else is as in qwen32b_dapo.
"""

from ml_collections import ConfigDict

from configs import gsm8k_random, qwen32b_dapo

NAME = "Qwen/Qwen2.5-0.5B-Instruct"


def get_config() -> ConfigDict:
    """Returns qwen32b_dapo with 0.5 billion parameters, 512-token responses and GSM8K."""
    c = qwen32b_dapo.get_config()
    c.model.update(path=NAME, tokenizer=NAME, vocab_size=151_936, num_layers=24, hidden_size=896)
    c.model.update(num_heads=14, num_kv_heads=2, head_dim=64, intermediate_size=4864)
    c.model.update(rms_norm_eps=1e-6, tie_embeddings=True, stop_token_ids=(151_645, 151_643))
    c.mesh.update(fsdp=-1, tensor=1)
    c.data = dict(prompt_template=gsm8k_random.PROMPT_TEMPLATE, max_prompt_tokens=512)
    c.data.train = dict(gsm8k=dict(path="gsm8k", split="train", weight=1.0))
    c.data.heldout = dict(gsm8k=dict(path="gsm8k", split="test"))
    # XLA's attention for heads of 64 has a copy of the cache: fewer slots.
    c.rollout.update(group_size=8, max_response_tokens=512, cache_gib=None, slots=128)
    c.reward.update(scorer="gsm8k", overlong_buffer_tokens=128, workers=8)
    c.dynamic_sampling.max_prompts = 2560
    c.optimizer.warmup_steps = 5
    c.train.update(num_steps=100, prompts_per_step=128, row_tokens=2048, rows_per_micro_batch=8)
    c.evaluation.update(every_steps=10, num_samples=1, temperature=0.0, top_p=1.0)
    return c
