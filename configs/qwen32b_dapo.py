"""The published run: DAPO on Qwen2.5-32B, 50 on AIME 2024 (avg@32) in the paper.

Command:   python launch/train.py --config=configs/qwen32b_dapo.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen32b_dapo.py --dry_run
Hardware:  laid out for 64 TPU v5p chips (4x4x4). Not yet run. The plan runs anywhere.
Time:      not measured; docs/plan.md estimates it
Result:    none yet

Values are those of the paper, arXiv:2503.14476, section 4.1, also where they equal a default of
`dapo_jax.config`. Where the published script (verl, recipe/dapo, commit 4f80e465) differs or the
paper is silent, the line says so.
"""

from ml_collections import ConfigDict

from dapo_jax.data.prompts import DAPO_TEMPLATE


def get_config() -> ConfigDict:
    """The published run, on 64 chips."""
    return ConfigDict(
        dict(
            model=dict(  # config.json and generation_config.json of the base model
                path="Qwen/Qwen2.5-32B", tokenizer="Qwen/Qwen2.5-32B", vocab_size=152_064,
                num_layers=64, hidden_size=5120, num_heads=40, num_kv_heads=8, head_dim=128,
                intermediate_size=27_648, rope_theta=1_000_000.0, rms_norm_eps=1e-5, qkv_bias=True,
                stop_token_ids=(151_643,), param_dtype="float32", compute_dtype="bfloat16",
            ),
            mesh=dict(fsdp=16, tensor=4),
            data=dict(
                train=dict(dapo=dict(path="dapo-math-17k", weight=1.0)),
                heldout=dict(aime24=dict(path="aime24")),
                prompt_template=DAPO_TEMPLATE,  # of AIME: the training prompts hold it already
                max_prompt_tokens=2048,
                overlong_prompts="truncate",  # script
            ),
            rollout=dict(
                group_size=16,
                max_response_tokens=20_480,  # 16,384 expected + 4,096 of punished buffer
                temperature=1.0,
                top_p=1.0,
                slots=2048,  # ours: more than memory holds at the longest, see cache_gib
                cache_gib=56.0,  # ours: docs/plan.md, How many slots
                decode_steps=16,
                watchdog_limit_seconds=1800.0,
                # As the script: in bfloat16 the rollout's log-probs are 1e-2 nats a token off.
                log_prob_source="recompute",
            ),
            reward=dict(  # workers are ours
                scorer="math_dapo", incorrect=-1.0, overlong_buffer_tokens=4096,
                overlong_penalty=1.0, workers=64,
            ),
            # Script: 10 rounds of three batches, what is beyond the batch dropped; the run ends
            # with an error where they do not fill it. Here the rest goes back to the data.
            dynamic_sampling=dict(enabled=True, max_prompts=15_360),
            # Script: clip_dual, std_ddof (torch.std); its mean over tokens is of a micro-batch,
            # then over micro-batches, here of the mini-batch.
            objective=dict(
                loss="ppo-clip", clip_low=0.2, clip_high=0.28, clip_dual=10.0,
                aggregation="token-mean", advantage="grpo", advantage_args=dict(std_ddof=1),
                overlong_filter=False, entropy_coefficient=0.0, kl_coefficient=0.0,
            ),
            optimizer=dict(  # the paper gives the rate and the warm-up
                learning_rate=1e-6,
                warmup_steps=20,  # script: 10, the first of them at rate 0
                weight_decay=0.1, beta1=0.9, beta2=0.999, max_grad_norm=1.0,
            ),
            train=dict(
                num_steps=625,  # ours: the 10,000 updates of the paper's figure 1, 16 to a step
                prompts_per_step=512,
                prompts_per_update=32,  # 512 responses
                row_tokens=22_528,  # script: tokens per device of a micro-batch
                rows_per_micro_batch=16,  # ours: one per fsdp shard
            ),
            evaluation=dict(every_steps=5, num_samples=32, temperature=1.0, top_p=0.7),
            checkpoint=dict(every_steps=1),  # ours: a step takes an hour; script: 5
            log=dict(rollouts_per_step=64),  # ours
        )
    )  # fmt: skip
