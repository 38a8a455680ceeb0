"""The published run: DAPO on Qwen2.5-32B, 50 on AIME 2024 (avg@32) in the paper.

Command:   python launch/train.py --config=configs/qwen32b_dapo.py --workdir=DIR
Plan only: python launch/train.py --config=configs/qwen32b_dapo.py --dry_run
Hardware:  laid out for 64 TPU v5p chips (4x4x4). Not yet run. The plan runs anywhere.

Values are those of the paper, arXiv:2503.14476, section 4.1. Where the published script (verl,
recipe/dapo, commit 4f80e465) differs or the paper is silent, the line says so.
"""

import ml_collections

from dapo_jax.prompts import DAPO_TEMPLATE


def get_config() -> ml_collections.ConfigDict:
    """Every field of the published run."""
    return ml_collections.ConfigDict(
        dict(
            seed=0,
            model=dict(  # config.json of Qwen/Qwen2.5-32B, the base model
                path="Qwen/Qwen2.5-32B",
                tokenizer="Qwen/Qwen2.5-32B",
                vocab_size=152_064,
                num_layers=64,
                width=5120,
                num_heads=40,
                num_kv_heads=8,
                head_dim=128,
                ff_width=27_648,
                rope_theta=1_000_000.0,
                rope_scaling=None,
                rms_norm_eps=1e-5,
                qkv_bias=True,
                qk_norm=False,
                tie_embeddings=False,
                sliding_window=ml_collections.config_dict.placeholder(int),
                sliding_layers=(),
                stop_token_ids=(151_643,),  # its generation_config.json
                param_dtype="float32",
                compute_dtype="bfloat16",
                remat="full",
                attention="auto",
                log_prob_chunk_tokens=4096,
            ),
            mesh=dict(
                data=1,
                fsdp=16,
                context=1,
                tensor=4,
                rollout_tensor=ml_collections.config_dict.placeholder(int),
                rules=(
                    ("vocab", "tensor"),
                    ("embed", "fsdp"),
                    ("heads", "tensor"),
                    ("kv_heads", "tensor"),
                    ("ff", "tensor"),
                    ("layers", None),
                ),
            ),
            data=dict(
                train=dict(
                    dapo=dict(
                        path="dapo-math-17k",
                        split=ml_collections.config_dict.placeholder(str),
                        weight=1.0,
                        num_problems=ml_collections.config_dict.placeholder(int),
                        num_terms=ml_collections.config_dict.placeholder(tuple),
                        prompt_key=ml_collections.config_dict.placeholder(str),
                        answer_key=ml_collections.config_dict.placeholder(str),
                        answer_in=ml_collections.config_dict.placeholder(str),
                        prompt_template=ml_collections.config_dict.placeholder(str),
                        scorer=ml_collections.config_dict.placeholder(str),
                    ),
                ),
                heldout=dict(
                    aime24=dict(
                        path="aime24",
                        split=ml_collections.config_dict.placeholder(str),
                        weight=ml_collections.config_dict.placeholder(float),
                        num_problems=ml_collections.config_dict.placeholder(int),
                        num_terms=ml_collections.config_dict.placeholder(tuple),
                        prompt_key=ml_collections.config_dict.placeholder(str),
                        answer_key=ml_collections.config_dict.placeholder(str),
                        answer_in=ml_collections.config_dict.placeholder(str),
                        prompt_template=ml_collections.config_dict.placeholder(str),
                        scorer=ml_collections.config_dict.placeholder(str),
                    ),
                ),
                prompt_template=DAPO_TEMPLATE,  # of AIME: the training prompts hold it already
                chat=True,
                system_prompt=ml_collections.config_dict.placeholder(str),  # the template's own
                max_prompt_tokens=2048,
                overlong_prompts="truncate",  # script
                cache_dir="",
            ),
            pretrain=None,
            rollout=dict(
                group_size=16,
                max_response_tokens=20_480,  # 16,384 expected + 4,096 of punished buffer
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                slots=704,  # ours: what memory holds at the longest, four chips to a copy
                prefill_prompts=16,  # ours, as the four below
                prefill_chunk_tokens=512,
                decode_steps=16,
                page_tokens=128,
                cache_gib=ml_collections.config_dict.placeholder(float),
                stop_strings=(),
                cache_dtype="auto",
                kernel="auto",
                # Script: recomputed by the training program, whose numerics differ from vLLM's.
                # Here rollout and training are one program.
                log_prob_source="rollout",
                watchdog_seconds=120.0,
                watchdog_limit_seconds=1800.0,
                watchdog_hang_factor=10.0,
            ),
            reward=dict(
                scorer="math_dapo",
                correct=1.0,
                incorrect=-1.0,
                overlong_buffer_tokens=4096,
                overlong_penalty=1.0,
                workers=64,  # ours
                timeout_seconds=10.0,  # ours
            ),
            dynamic_sampling=dict(
                enabled=True,
                max_rounds=10,  # script; the paper is silent
                max_round_prompts=1536,  # script: three times the batch
                surplus="return",  # script: rounds, and drop
                keep_slots_full=False,
                partial_rollouts=False,
                max_staleness=1,
                exhausted="train",  # script: the run ends with an error
                prefilter=dict(  # not in the paper: GRESO, with the values of its authors
                    enabled=False,
                    initial_probability=0.5,
                    min_probability=0.05,
                    max_probability=0.95,
                    probability_step=0.01,
                    target_easy=1 / 12,
                    target_hard=1 / 6,
                    min_sampled=0.01,
                    max_skips=20_000,  # ours
                ),
            ),
            objective=dict(
                loss="ppo-clip",
                clip_low=0.2,
                clip_high=0.28,
                clip_dual=10.0,  # script; the paper has no dual clip
                tau_positive=ml_collections.config_dict.placeholder(float),
                tau_negative=ml_collections.config_dict.placeholder(float),
                ratio_cap=ml_collections.config_dict.placeholder(float),
                dro_beta=ml_collections.config_dict.placeholder(float),
                cov_share=ml_collections.config_dict.placeholder(float),
                cov_low=ml_collections.config_dict.placeholder(float),
                cov_high=ml_collections.config_dict.placeholder(float),
                cov_kl_coefficient=ml_collections.config_dict.placeholder(float),
                # Script: a mean per micro-batch, then over micro-batches. Here over the mini-batch.
                aggregation="token-mean",
                advantage="grpo",
                normalise_std=True,
                std_ddof=1,  # script (torch.std); the paper does not say
                component_weights=ml_collections.config_dict.placeholder(tuple),
                gamma=ml_collections.config_dict.placeholder(float),
                gae_lambda=ml_collections.config_dict.placeholder(float),
                gpg_norm=ml_collections.config_dict.placeholder(float),
                overlong_filter=False,  # Table 1, row 2; the full system punishes instead
                overlong_in_baseline=True,
                entropy_coefficient=0.0,
                kl_coefficient=0.0,
                kl_estimator=ml_collections.config_dict.placeholder(str),
                reward_kl_coefficient=0.0,
                reward_kl_estimator=ml_collections.config_dict.placeholder(str),
                reward_kl_target=ml_collections.config_dict.placeholder(float),
                reward_kl_horizon=ml_collections.config_dict.placeholder(int),
            ),
            correction=None,
            critic=None,
            optimizer=dict(
                learning_rate=1e-6,
                warmup_steps=20,  # script: 10, the first of them at rate 0
                decay="constant",
                final_rate_share=ml_collections.config_dict.placeholder(float),
                weight_decay=0.1,  # script; the paper is silent, as for the four below
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                max_grad_norm=1.0,
                max_nonfinite_updates=3,  # ours
                moments_dtype="float32",
                offload=False,
            ),
            train=dict(
                num_steps=625,  # ours: the 10,000 updates of the paper's figure 1, 16 to a step
                prompts_per_step=512,
                prompts_per_update=32,  # 512 responses
                row_tokens=22_528,  # script: tokens per device of a micro-batch
                rows_per_micro_batch=16,  # ours: one per fsdp shard
                share_prompts=False,
            ),
            evaluation=dict(
                every_steps=5, num_samples=32, temperature=1.0, top_p=0.7, top_k=0, min_p=0.0
            ),
            checkpoint=dict(
                every_steps=1,  # ours: a step takes an hour, see docs/pods.md; the script has 5
                keep_newest=2,
                keep_best=1,
                directory=ml_collections.config_dict.placeholder(str),
            ),
            log=dict(rollouts_per_step=64, profile_steps=()),  # ours
        )
    )
