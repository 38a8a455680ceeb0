"""Four rows on SmolLM2-135M-Instruct: naive GRPO, DAPO, and DAPO without two of its techniques.

Command:   python launch/ablate.py --config=configs/ablation_smollm2.py --workdir=runs/smollm2_rows
           --seeds=3; --model=DIRECTORY where the hub cannot be reached
Hardware:  2 CPU cores, 16 GB of memory for two runs at a time
Result:    held-out avg@8 of GRPO 52.3, 40.4 and 63.1 %, of DAPO 66.8, 61.3 and 63.1 %, without
           dynamic sampling 46.3, 42.6 and 59.2 %, without token-level loss 54.5, 61.5 and 66.4 %
           (seeds 0, 1, 2), see docs/results.md
"""

from ml_collections import ConfigDict

from configs import ablation, smollm2_word_problems


def no_dynamic_sampling(c: ConfigDict) -> None:
    """DAPO without dynamic sampling."""
    ablation.token_loss(c)


ROWS = (ablation.grpo, ablation.dapo, no_dynamic_sampling, ablation.no_token_loss)


def get_config(row: str = "dapo") -> ConfigDict:
    """Returns smollm2_word_problems with the changes of a row."""
    change = ablation.change_of(row, ROWS)
    c = smollm2_word_problems.get_config()
    # The schedule of the runs above.
    c.optimizer.final_rate_share = None
    c.train.num_steps = c.evaluation.every_steps = 13
    change(c)
    return c
