"""The whole path on real data in two minutes: GSM8K, Qwen2.5's tokenizer, a small random model.

Command:   python launch/train.py --config=configs/gsm8k_random.py
           without the network: --config.data.train.gsm8k.path=gsm8k/train.jsonl
           --config.data.heldout.gsm8k.path=gsm8k/test.jsonl --config.model.tokenizer=DIRECTORY

Shows that prompts, chat template, tokenizer, scorers, update, evaluation and checkpoints work on
real data before a large run is paid for. A random model does not learn to reason from it.
"""

from ml_collections import ConfigDict

from configs import tiny_dapo

PROMPT_TEMPLATE = '{prompt} Let\'s think step by step and output the final answer after "####".'


def get_config() -> ConfigDict:
    """Returns tiny_dapo on GSM8K with a vocabulary of 152k tokens."""
    c = tiny_dapo.get_config()
    c.model.update(tokenizer="Qwen/Qwen2.5-0.5B", vocab_size=151_936, hidden_size=64, head_dim=16)
    c.model.update(intermediate_size=192, rope_theta=1_000_000.0, log_prob_chunk_tokens=512)
    c.pretrain = None
    c.data = dict(prompt_template=PROMPT_TEMPLATE, max_prompt_tokens=256, overlong_prompts="drop")
    c.data.train = dict(gsm8k=dict(path="gsm8k", split="train", weight=1.0, num_problems=1000))
    c.data.heldout = dict(gsm8k=dict(path="gsm8k", split="test", num_problems=8))
    c.rollout.update(max_response_tokens=32, group_size=4, slots=32, prefill_prompts=8)
    # Random text is never right: the share of English letters gives the updates something to
    # follow, and shows how to write a scorer.
    c.reward.scorer = "gsm8k + 1.0 * configs/gsm8k_random.py:letters"
    c.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)
    c.dynamic_sampling.enabled = False
    c.train.update(num_steps=2, prompts_per_step=8, row_tokens=512, rows_per_micro_batch=8)
    c.evaluation.update(num_samples=4, every_steps=2)
    c.checkpoint.every_steps = 1
    return c


def letters(
    texts: list[str], token_ids: list[list[int]], answers: list[str], metadata: list[dict | None]
) -> list[tuple[float, bool, dict]]:
    """Returns (share of the characters that are English letters, not correct, extra) of each."""
    shares = [sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)) for text in texts]
    return [(share, False, {"letters": share}) for share in shares]
