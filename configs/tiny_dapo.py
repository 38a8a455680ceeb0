"""DAPO on generated arithmetic, from nothing to solved on a laptop.

Command:   python launch/train.py --config=configs/tiny_dapo.py
Hardware:  2 CPU cores, 1 GB of memory
Time:      2 to 8 minutes, more than half of it for the base model, which later runs reuse
Result:    held-out avg@32 from 28-30 % to 99-100 % (seeds 0, 1, 2)

Problems are sums of 3, 5, 7 or 9 terms. The base model guesses, derives the sum term by term, or
rambles until the limit cuts it off: each of DAPO's four techniques has something to act on.
"""

from ml_collections import ConfigDict

from dapo_jax.config import MeshConfig

SUMS = dict(path="arithmetic", levels=(3, 5, 7, 9))


def get_config() -> ConfigDict:
    """Returns what differs from the defaults of `dapo_jax.config`, and DAPO's four techniques."""
    c = ConfigDict()
    c.model = dict(vocab_size=32, num_layers=2, hidden_size=128, intermediate_size=384)
    c.model.update(num_heads=4, num_kv_heads=2, head_dim=32, qkv_bias=True, tie_embeddings=True)
    c.model.update(compute_dtype="float32", remat="none", log_prob_chunk_tokens=16_384)
    c.mesh = dict(data=-1, fsdp=1, rules=(("vocab", None), *MeshConfig.rules[1:]))
    c.data = dict(chat=False, max_prompt_tokens=24, overlong_prompts="drop")
    c.data.train = dict(sums=dict(SUMS, split="train", weight=1.0, num_problems=2000))
    c.data.heldout = dict(sums=dict(SUMS, split="heldout", num_problems=64))
    c.pretrain = dict(num_steps=600)
    c.rollout = dict(group_size=8, max_response_tokens=72, log_prob_source="rollout")
    c.rollout.update(decode_steps=8, page_tokens=32)
    c.reward = dict(scorer="exact_match", workers=1, timeout_seconds=5.0)
    c.reward.update(overlong_buffer_tokens=16, overlong_penalty=1.0)  # soft overlong punishment
    c.dynamic_sampling = dict(enabled=True, max_prompts=960)
    c.objective = dict(clip_low=0.2, clip_high=0.28, aggregation="token-mean")
    c.objective.clip_dual = 10.0  # the published script's
    c.optimizer = dict(learning_rate=1e-4, warmup_steps=2)
    c.train = dict(num_steps=30, prompts_per_step=32, prompts_per_update=4, row_tokens=128)
    c.evaluation = dict(every_steps=3)
    c.checkpoint = dict(every_steps=3)
    return c
