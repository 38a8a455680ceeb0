r"""DAPO with LoRA on Qwen2.5-1.5B-Instruct and GSM8K: a free accelerator is enough.

Command:   python launch/train.py --config=configs/qwen1_5b_gsm8k_lora.py
           --config=configs/qwen1_5b_gsm8k_lora.py:t4 on a T4, which has no bfloat16
Hardware:  one TPU v5e chip (v5e-1) or one GPU of 24 GB; :t4 for one GPU of 16 GB without bfloat16
Memory:    11 of 15.75 GiB, compiled for a v5e; others: docs/lora.md
Time:      not yet run on any of them
Result:    none yet. Others report 77.9 % of the test split after GRPO with LoRA of rank 32:
           github.com/verl-project/verl, docs/algo/baseline.md

The base is frozen in bfloat16. All linear layers have adapters of rank 32. The learning rate is ten
times that of training all parameters (docs/lora.md). All else is as in qwen0_5b_gsm8k.
"""

from ml_collections import ConfigDict

from configs import qwen0_5b_gsm8k

NAME = "Qwen/Qwen2.5-1.5B-Instruct"


def get_config(device: str = "") -> ConfigDict:
    """Returns qwen0_5b_gsm8k with adapters on 1.5 billion parameters and 1,024-token responses."""
    c = qwen0_5b_gsm8k.get_config(device)
    c.model.update(path=NAME, tokenizer=NAME, num_layers=28, hidden_size=1536, num_heads=12)
    c.model.update(head_dim=128, intermediate_size=8960, lora_rank=32, lora_alpha=64.0)
    c.rollout.update(max_response_tokens=1024)
    c.reward.overlong_buffer_tokens = 256
    c.optimizer.learning_rate = 1e-5
    c.train.update(row_tokens=2048)
    return c
