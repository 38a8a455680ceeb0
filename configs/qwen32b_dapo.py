"""The published run: DAPO on Qwen2.5-32B, 50 on AIME 2024 (avg@32) in the paper.

Command:   python launch/train.py --config=configs/qwen32b_dapo.py
           --config=configs/qwen32b_dapo.py:ROW is another row of the paper's Table 1: grpo (30),
           overlong_filter (36), clip_higher (38), overlong_punishment (41), token_loss (42)
Plan only: python launch/train.py --config=configs/qwen32b_dapo.py --dry_run
Hardware:  laid out for 64 TPU v5p chips (4x4x4). Not yet run. The plan runs anywhere.
Time:      not measured; docs/plan.md estimates it
Result:    none yet

The values are those of the paper, arXiv:2503.14476, section 4.1, also where they equal a default.
Comments mark values of the published script (verl, recipe/dapo, commit 4f80e465) and ours. Other
rows differ by their techniques alone: they keep the 20,480 tokens, and no KL term. The paper does
not say whether its own did.
"""

from ml_collections import ConfigDict

from configs import ablation
from dapo_jax.data.prompts import DAPO_TEMPLATE

NAME = "Qwen/Qwen2.5-32B"


def get_config(row: str = "dapo") -> ConfigDict:
    """Returns the published run, on 64 chips, or one of configs/ablation.py's TABLE_1."""
    change = ablation.change_of(row, ablation.TABLE_1)
    c = ConfigDict()
    # From the base model's config.json and generation_config.json.
    c.model = dict(path=NAME, tokenizer=NAME, vocab_size=152_064, num_layers=64, hidden_size=5120)
    c.model.update(intermediate_size=27_648, num_heads=40, num_kv_heads=8, head_dim=128)
    c.model.update(rope_theta=1_000_000.0, rms_norm_eps=1e-5, qkv_bias=True)
    c.model.stop_token_ids = (151_643,)
    c.mesh = dict(fsdp=16, tensor=4)
    c.data = dict(max_prompt_tokens=2048, overlong_prompts="truncate")  # script
    c.data.train = dict(dapo=dict(path="dapo-math-17k", weight=1.0))
    c.data.heldout = dict(aime24=dict(path="aime24"))
    c.data.prompt_template = DAPO_TEMPLATE  # of AIME: the training prompts hold it already
    # 16,384 expected tokens and 4,096 of punished buffer.
    c.rollout = dict(group_size=16, max_response_tokens=20_480, temperature=1.0, top_p=1.0)
    # Ours: more slots than memory holds at their longest, see docs/plan.md.
    c.rollout.update(slots=2048, cache_gib=56.0, watchdog_limit_seconds=1800.0)
    # Script; in bfloat16 the rollout's log-probs differ by 1e-2 nats a token.
    c.rollout.log_prob_source = "recompute"
    c.reward = dict(scorer="math_dapo", incorrect=-1.0, workers=64)  # workers: ours
    c.reward.update(overlong_buffer_tokens=4096, overlong_penalty=1.0)
    # Script: 10 rounds of three batches. If they do not fill the batch, the script stops; ours
    # trains on what there is.
    c.dynamic_sampling = dict(enabled=True, max_prompts=15_360)
    c.objective = dict(loss="ppo-clip", clip_low=0.2, clip_high=0.28, aggregation="token-mean")
    c.objective.update(overlong_filter=False, entropy_coefficient=0.0, kl_coefficient=0.0)
    c.objective.update(clip_dual=10.0, advantage="grpo", advantage_args=dict(std_ddof=1))  # script
    # The paper gives the rate and 20 steps of warm-up; the script warms up in 10.
    c.optimizer = dict(learning_rate=1e-6, warmup_steps=20)
    c.optimizer.update(weight_decay=0.1, betas=(0.9, 0.999), max_grad_norm=1.0)  # script
    # 512 prompts a step in 16 updates of 512 responses; 625 steps are figure 1's 10,000 updates.
    c.train = dict(num_steps=625, prompts_per_step=512, prompts_per_update=32)
    c.train.update(row_tokens=22_528, rows_per_micro_batch=16)  # script; ours: one per fsdp shard
    c.evaluation = dict(every_steps=5, num_samples=32, temperature=1.0, top_p=0.7)
    c.checkpoint = dict(every_steps=1)  # ours: a step takes an hour; script: 5
    c.log = dict(rollouts_per_step=64)  # ours
    change(c)
    return c
