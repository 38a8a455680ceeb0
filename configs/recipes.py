"""Recipes published since DAPO, each a few lines on a config of this project.

Command:   python launch/train.py --config=configs/recipes.py:RECIPE
           --config=configs/tiny.py:RECIPE is the same method on the tiny task
Plan only: python launch/train.py --config=configs/recipes.py:RECIPE --dry_run
Hardware:  8 TPU v5p chips (2x2x2), those of the 32B 64 (4x4x4). Neither compiled nor run.
Result:    none yet; docs/log.md has the methods on the tiny task

A function is the method, its entry in RUNS the model, the lengths and the batch. Where a paper
publishes no value, DAPO's stays; the numbers of steps of deepscaler and scalerl are ours. Problems,
prompts and scorer are DAPO's in all of them. "Not here" names what this project cannot do or does
otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import qwen3_8b_dapo, qwen7b_dapo, qwen32b_dapo
from dapo_jax.types import UserError


def justrl(c: ConfigDict) -> None:
    """JustRL (arXiv:2512.16649, its published script): DAPO's loss alone, no filter, no length
    penalty."""
    c.dynamic_sampling.enabled = False
    _no_length_penalty(c)


def deepscaler(c: ConfigDict) -> None:
    """DeepScaleR (the published scripts): GRPO at temperature 0.6, in three stages of length."""
    justrl(c)
    c.rollout.temperature = 0.6
    c.objective.update(clip_high=c.objective.clip_low, clip_dual=None)
    c.objective.update(kl_coefficient=0.001, entropy_coefficient=0.001)


def polaris(c: ConfigDict) -> None:
    """POLARIS (the published scripts, stage 1 of R1-Distill-Qwen-7B). Its later stages have 23,552
    and 31,744 tokens at temperatures 1.0 and 1.1, and easy problems leave; their first steps are
    not published. Not here: it fills a batch with copies of informative groups, this with new ones.
    """
    c.rollout.temperature = 0.7
    c.objective.update(clip_dual=3.0)
    c.optimizer.weight_decay = 0.01
    _no_length_penalty(c)


def skywork_or1(c: ConfigDict) -> None:
    """Skywork-OR1 7B (arXiv:2505.22312, table 11, equations 3.1 and 3.2): on-policy, an entropy
    bonus that adapts, and problems that leave once they are always solved. Not here: these leave
    after a visit, not after a stage."""
    c.reward.incorrect = 0.0
    c.objective.update(clip_high=c.objective.clip_low, clip_dual=None)
    c.objective.entropy_adaptation = (0.2, 0.005)  # the published scripts: 0.2 and 1e-4
    c.optimizer.weight_decay = 0.01
    c.data.pass_rate_band = (0.0, 1.0)
    _no_refill(c)
    _no_length_penalty(c)


def magistral(c: ConfigDict) -> None:
    """Magistral (arXiv:2506.10910, section 2): one update a batch, responses carried, a length
    penalty of at most 0.1. Lower bound, rate and G are not published. Not here: its rewards for
    format and language."""
    c.rollout.max_staleness = 2
    c.reward.update(incorrect=0.0, overlong_penalty=0.1)
    c.objective.update(clip_dual=None, aggregation="token-mean-per-group")
    c.objective.update(advantage="lite-ppo", advantage_args=dict(std_of="advantages"))
    c.train.prompts_per_update = c.train.prompts_per_step


def minimax_m1(c: ConfigDict) -> None:
    """MiniMax-M1's CISPO on DAPO's problems and base (arXiv:2506.13585, section 3). The upper bound
    is not published: 5 is in the range of ScaleRL's (arXiv:2510.13786, A.17.2)."""
    c.model.head_dtype = "float32"
    c.objective.update(loss="cispo", clip_low=1.0, clip_high=4.0, clip_dual=None)
    c.objective.aggregation = "token-mean-per-group"  # eq. 4
    c.optimizer.update(betas=(0.9, 0.95), eps=1e-15)


def scalerl(c: ConfigDict) -> None:
    """ScaleRL (arXiv:2510.13786, section 4): CISPO, the mean of each prompt, no refill, no problem
    solved nine times in ten, truncated responses left out, thinking ended after 12,288 tokens
    (section 2; by its base in RUNS, as the tiny task has no thinking). Whether it trains the tokens
    that end thinking is not published; here they are not.
    """
    c.model.head_dtype = "float32"
    c.data.pass_rate_band = (0.0, 0.9)
    c.rollout.update(max_staleness=8, log_prob_source="rollout")
    # An upper bound of 5; 4 and 8 did as well.
    c.objective.update(loss="cispo", clip_low=1.0, clip_high=4.0, clip_dual=None)
    c.objective.update(aggregation="token-mean-per-group", overlong_filter=True)
    c.objective.update(advantage="lite-ppo", advantage_args=dict(std_of="advantages"))
    c.optimizer.update(eps=1e-15, weight_decay=0.01)
    c.train.prompts_per_update = c.train.prompts_per_step
    _no_refill(c)
    _no_length_penalty(c)


def r1_zero(c: ConfigDict) -> None:
    """DeepSeek-R1-Zero's GRPO (arXiv:2501.12948v2, section 2.1), its 660B's values on the 32B:
    those of DeepSeek-R1-Zero-Qwen-32B (47 on AIME 2024) are not published. The bound 10 is of R1's
    first stage (section 3.2.1). Not here: the KL is to the base model throughout, not to the policy
    of the last multiple of 400 steps; no reward for format."""
    c.dynamic_sampling.enabled = False
    c.objective.update(clip_low=1.0, clip_high=10.0, clip_dual=None, kl_coefficient=0.001)
    c.objective.aggregation = "seq-mean-token-mean"
    _no_length_penalty(c)


def _no_length_penalty(c: ConfigDict) -> None:
    c.reward.update(overlong_buffer_tokens=0, overlong_penalty=0.0)


def _no_refill(c: ConfigDict) -> None:
    """Uninformative groups leave the batch, and no others take their places."""
    c.dynamic_sampling.max_prompts = c.train.prompts_per_step


def _distilled_1_5b() -> ConfigDict:
    """Returns DAPO on DeepSeek-R1-Distill-Qwen-1.5B."""
    c, name = _distilled_7b(), "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    c.model.update(path=name, tokenizer=name, vocab_size=151_936, hidden_size=1536, num_heads=12)
    c.model.update(num_kv_heads=2, intermediate_size=8960)
    return c


def _distilled_7b() -> ConfigDict:
    """Returns DAPO on DeepSeek-R1-Distill-Qwen-7B."""
    c, name = qwen7b_dapo.get_config(), "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    c.model.update(path=name, tokenizer=name, rope_theta=10_000.0)
    c.rollout.slots = 256
    return c


def _ending_repetition() -> ConfigDict:
    """Returns DAPO on the 32B, which ends a response at 3,000 sure tokens in a row."""
    c = qwen32b_dapo.get_config()
    c.rollout.end_repetition = 3000
    return c


def _ending_thinking() -> ConfigDict:
    """Returns DAPO on Qwen3-8B-Base, which ends thinking after 12,288 tokens."""
    c = qwen3_8b_dapo.get_config()
    phrase = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    c.rollout.end_of_thinking = (12_288, phrase)
    return c


class Run(NamedTuple):
    """A recipe's model and sizes; stages as in `config.stages`."""

    method: Callable[[ConfigDict], None]
    base: Callable[[], ConfigDict]
    prompt_tokens: int
    response_tokens: int
    group_size: int
    prompts_per_step: int
    prompts_per_update: int
    learning_rate: float
    warmup_steps: int
    num_steps: int
    stages: tuple[tuple[int, dict[str, int]], ...] = ()


def _stage(tokens: int, group_size: int, prompts: int | None = None) -> dict[str, int]:
    """Returns a stage of longer responses; with `prompts`, one update a step and no refill."""
    lengths = {"rollout.max_response_tokens": tokens, "train.row_tokens": tokens + 2048}
    sizes = ("train.prompts_per_step", "train.prompts_per_update", "dynamic_sampling.max_prompts")
    changed = lengths | {"rollout.group_size": group_size}
    return changed if prompts is None else changed | dict.fromkeys(sizes, prompts)


RUNS = {
    "justrl": Run(
        justrl, _distilled_1_5b,
        prompt_tokens=1024, response_tokens=15_360, group_size=8,
        prompts_per_step=256, prompts_per_update=64,
        learning_rate=1e-6, warmup_steps=10, num_steps=4380,
    ),
    "deepscaler": Run(
        deepscaler, _distilled_1_5b,
        prompt_tokens=1024, response_tokens=8192, group_size=8,
        prompts_per_step=128, prompts_per_update=64,
        learning_rate=1e-6, warmup_steps=0, num_steps=1750,
        stages=((1041, _stage(16_384, 16)), (1521, _stage(24_576, 16))),
    ),
    "polaris": Run(
        polaris, _distilled_7b,
        prompt_tokens=1024, response_tokens=15_360, group_size=8,
        prompts_per_step=128, prompts_per_update=128,
        learning_rate=1e-6, warmup_steps=0, num_steps=700,
    ),
    "skywork_or1": Run(
        skywork_or1, _distilled_7b,
        prompt_tokens=2048, response_tokens=16_384, group_size=16,
        prompts_per_step=256, prompts_per_update=256,
        learning_rate=1e-6, warmup_steps=0, num_steps=1320,
        stages=((661, _stage(32_768, 32, prompts=160)),),
    ),
    "magistral": Run(
        magistral, qwen32b_dapo.get_config,
        prompt_tokens=2048, response_tokens=20_480, group_size=16,
        prompts_per_step=512, prompts_per_update=512,
        learning_rate=1e-6, warmup_steps=20, num_steps=625,
    ),
    "minimax_m1": Run(
        minimax_m1, _ending_repetition,
        prompt_tokens=2048, response_tokens=20_480, group_size=16,
        prompts_per_step=512, prompts_per_update=32,
        learning_rate=1e-6, warmup_steps=20, num_steps=625,
    ),
    "scalerl": Run(
        scalerl, _ending_thinking,
        prompt_tokens=2048, response_tokens=14_336, group_size=16,
        prompts_per_step=48, prompts_per_update=48,
        learning_rate=5e-7, warmup_steps=100, num_steps=1000,
    ),
    "r1_zero": Run(
        r1_zero, qwen32b_dapo.get_config,
        prompt_tokens=2048, response_tokens=32_768, group_size=16,
        prompts_per_step=512, prompts_per_update=32,
        learning_rate=3e-6, warmup_steps=20, num_steps=650,
        stages=((513, _stage(65_536, 16)),),  # update 8,200, of 16 in a step
    ),
}  # fmt: skip


def get_config(recipe: str = "") -> ConfigDict:
    """Returns a recipe."""
    run = RUNS.get(recipe.replace("-", "_"))
    if run is None:
        raise UserError(
            f"--config=configs/recipes.py:RECIPE: {recipe!r} is not one of {', '.join(RUNS)}."
        )
    c = run.base()
    c.data.max_prompt_tokens = run.prompt_tokens
    if c.rollout.cache_gib is None:
        c.rollout.cache_gib = 48.0  # ours
    c.rollout.update(group_size=run.group_size, max_response_tokens=run.response_tokens)
    c.train.update(prompts_per_step=run.prompts_per_step, num_steps=run.num_steps)
    c.train.prompts_per_update = run.prompts_per_update
    c.train.row_tokens = run.response_tokens + 2048
    c.dynamic_sampling.max_prompts = 30 * run.prompts_per_step  # script of DAPO: 10 x 3 batches
    c.optimizer.update(learning_rate=run.learning_rate, warmup_steps=run.warmup_steps)
    run.method(c)
    c.stages = run.stages
    return c
