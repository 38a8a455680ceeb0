r"""DAPO on Qwen2.5-0.5B-Instruct and GSM8K: a real model on one accelerator.

Command:   python launch/train.py --config=configs/qwen0_5b_gsm8k.py
           --config=configs/qwen0_5b_gsm8k.py:t4 on a T4, which has no bfloat16
Plan only: python launch/train.py --config=configs/qwen0_5b_gsm8k.py --dry_run --config.mesh.fsdp=1
Hardware:  one TPU v5e chip (v5e-1) or one GPU of 24 GB; :t4 for one GPU of 16 GB without bfloat16
Memory:    13.3 of 15.75 GiB, compiled for a v5e; by arithmetic 9.3 GiB and activations on a GPU,
           8.7 GiB and activations on a T4: docs/plan.md, "GSM8K on one accelerator"
Time:      not yet run on any of them
Result:    none yet. Others report 49.6 % of the test split before and 54.3 (GRPO with LoRA) to
           58.7 % (PRIME) after RL: github.com/verl-project/verl, docs/algo/baseline.md

GSM8K's prompts have at most 256 tokens in this chat template, 104 on average. The prompt asks for a
\boxed{} as Qwen's own does, and the scorer takes the last number, so that the form of an answer has
not to be learnt first. Evaluation is greedy on the 1,319 problems of the test split: avg@1.

A base model of this size, or one of 135 million parameters, is a trap: docs/models.md. Everything
else is as in qwen32b_dapo.
"""

from ml_collections import ConfigDict

from configs import qwen32b_dapo
from dapo_jax.types import UserError

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
PROMPT_TEMPLATE = (
    "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)


def get_config(device: str = "") -> ConfigDict:
    """Returns qwen32b_dapo with 0.5 billion parameters, 512-token responses and GSM8K; with "t4"
    in float32 and a quarter of the batch."""
    if device not in ("", "t4"):
        raise UserError(f"--config=FILE:DEVICE: the device {device!r} is not t4.")
    c = qwen32b_dapo.get_config()
    c.model.update(path=NAME, tokenizer=NAME, vocab_size=151_936, num_layers=24, hidden_size=896)
    c.model.update(num_heads=14, num_kv_heads=2, head_dim=64, intermediate_size=4864)
    c.model.update(rms_norm_eps=1e-6, tie_embeddings=True, stop_token_ids=(151_645, 151_643))
    c.model.log_prob_chunk_tokens = 1024  # 0.6 GiB of logits: the vocabulary is large here
    c.mesh.update(fsdp=-1, tensor=1)
    c.data = dict(prompt_template=PROMPT_TEMPLATE, max_prompt_tokens=256)
    c.data.train = dict(gsm8k=dict(path="gsm8k", split="train", weight=1.0))
    c.data.heldout = dict(gsm8k=dict(path="gsm8k", split="test"))
    # XLA's attention for heads of 64 has a copy of the cache on TPUs: fewer slots.
    c.rollout.update(group_size=8, max_response_tokens=512, cache_gib=None, slots=160)
    c.rollout.watchdog_limit_seconds = 0.0  # nothing restarts a notebook
    c.reward.update(scorer="last_number", overlong_buffer_tokens=128, workers=8)
    c.dynamic_sampling.max_prompts = 2560
    c.optimizer.warmup_steps = 5
    c.train.update(num_steps=100, prompts_per_step=128, row_tokens=1536, rows_per_micro_batch=8)
    c.evaluation.update(every_steps=10, num_samples=1, temperature=0.0, top_p=1.0)
    c.checkpoint.every_steps = 10  # 5.5 GiB each
    if device == "t4":
        c.model.compute_dtype = "float32"
        # In float32 the rollout's log-probs are those of the training program, to 1e-6.
        c.rollout.update(log_prob_source="rollout", slots=64)
        c.train.update(prompts_per_step=32, prompts_per_update=8, rows_per_micro_batch=2)
        c.dynamic_sampling.max_prompts = 640
        c.reward.workers = 2  # Colab's machine has two cores
        c.checkpoint.keep_newest = 1  # Kaggle keeps 20 GB
    return c
