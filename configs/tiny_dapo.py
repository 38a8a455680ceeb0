"""DAPO on generated arithmetic, from nothing to solved on a laptop.

Command:   python launch/train.py --config=configs/tiny_dapo.py --workdir=runs/tiny_dapo
Hardware:  2 CPU cores, 1 GB of memory
Time:      2.5 to 4.5 minutes, more than half of it for the base model, which later runs of the
           seed reuse
Result:    held-out avg@32 from 28-30 % to 99-100 % (seeds 0, 1, 2)

Problems are sums of 3, 5, 7 or 9 terms. The base model writes what its data holds: guesses, mostly
wrong; derivations, most of them sound; ramblers that start over until the limit cuts them off. So
each of the four techniques has something to act on.
"""

from ml_collections import ConfigDict

from dapo_jax.config import MeshConfig


def get_config() -> ConfigDict:
    """What differs from the defaults of `dapo_jax.config`, and the four techniques of DAPO."""
    sums = dict(path="arithmetic", num_terms=(3, 5, 7, 9))
    return ConfigDict(
        dict(
            model=dict(
                vocab_size=32, num_layers=2, hidden_size=128, num_heads=4, num_kv_heads=2,
                head_dim=32, intermediate_size=384, qkv_bias=True, tie_embeddings=True,
                compute_dtype="float32", remat="none", log_prob_chunk_tokens=16_384,
            ),
            mesh=dict(data=-1, fsdp=1, rules=(("vocab", None), *MeshConfig.rules[1:])),
            data=dict(
                train=dict(sums=dict(sums, split="train", weight=1.0, num_problems=2000)),
                heldout=dict(sums=dict(sums, split="heldout", num_problems=64)),
                chat=False, max_prompt_tokens=24, overlong_prompts="drop",
            ),
            pretrain=dict(num_steps=600),
            rollout=dict(
                group_size=8, max_response_tokens=72, decode_steps=8, page_tokens=32,
                log_prob_source="rollout",
            ),
            # Soft overlong punishment over the last 16 tokens.
            reward=dict(
                scorer="exact_match", overlong_buffer_tokens=16, overlong_penalty=1.0, workers=1,
                timeout_seconds=5.0,
            ),
            dynamic_sampling=dict(enabled=True, max_prompts=960),
            # Clip-Higher and the token-level loss; clip_dual is the published script's.
            objective=dict(
                clip_low=0.2, clip_high=0.28, clip_dual=10.0, aggregation="token-mean"
            ),
            optimizer=dict(learning_rate=1e-4, warmup_steps=2),
            train=dict(
                num_steps=30, prompts_per_step=32, prompts_per_update=4, row_tokens=128
            ),
            evaluation=dict(every_steps=3),
            checkpoint=dict(every_steps=3),
        )
    )  # fmt: skip
