"""The whole path on real data in two minutes: GSM8K, Qwen2.5's tokenizer, a small random model.

Not a run that learns to reason, for its parameters are random. It shows that prompts, chat
template, tokenizer, scorers, update, evaluation and checkpoints work together on real data before a
large run is paid for.

Command:   python launch/train.py --config=configs/gsm8k_random.py --workdir=runs/gsm8k_random
           without the network: --config.data.train.gsm8k.path=gsm8k/train.jsonl
           --config.data.heldout.gsm8k.path=gsm8k/test.jsonl --config.model.tokenizer=DIRECTORY
"""

from ml_collections import ConfigDict

from configs import tiny_dapo

PROMPT_TEMPLATE = '{prompt} Let\'s think step by step and output the final answer after "####".'


def get_config() -> ConfigDict:
    """tiny_dapo on GSM8K with a vocabulary of 152k tokens."""
    config = tiny_dapo.get_config()
    config.model.update(
        tokenizer="Qwen/Qwen2.5-0.5B", vocab_size=151_936, hidden_size=64, head_dim=16
    )
    config.model.update(intermediate_size=192, rope_theta=1_000_000.0, log_prob_chunk_tokens=512)
    config.pretrain = None
    config.data = dict(
        train=dict(gsm8k=dict(path="gsm8k", split="train", weight=1.0, num_problems=1000)),
        heldout=dict(gsm8k=dict(path="gsm8k", split="test", num_problems=8)),
        prompt_template=PROMPT_TEMPLATE,
        max_prompt_tokens=256,
        overlong_prompts="drop",
    )
    config.rollout.update(max_response_tokens=32, group_size=4, slots=32, prefill_prompts=8)
    # Random text is never right. How much of it is English letters gives the updates something to
    # follow, and shows how a scorer of one's own is written.
    config.reward.scorer = "gsm8k + 1.0 * configs/gsm8k_random.py:letters"
    config.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)
    config.dynamic_sampling.enabled = False
    config.train.update(num_steps=2, prompts_per_step=8, prompts_per_update=4)
    config.train.update(row_tokens=512, rows_per_micro_batch=8)
    config.evaluation.update(num_samples=4, every_steps=2)
    config.checkpoint.every_steps = 1
    return config


def letters(
    texts: list[str], token_ids: list[list[int]], answers: list[str], metadata: list[dict | None]
) -> list[tuple[float, bool, dict]]:
    """(reward, correct, extra) of each text: the share of its characters that are English letters,
    which nothing makes correct."""
    shares = [sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)) for text in texts]
    return [(share, False, {"letters": share}) for share in shares]
