"""ScaleRL, DAPO and naive GRPO on the task of configs/ablation.py, for accuracy against compute.

Command:   python launch/ablate.py --config=configs/ablation_scaling.py --workdir=runs/scaling
           python launch/report.py --workdir=runs/scaling/dapo/seed_0 --compare DIR ... --fit=tokens
Hardware:  2 CPU cores, 1 GB of memory
Time:      22 minutes for five seeds of each row
Result:    held-out avg@32 from 13-16 % to 90.6 % (DAPO), 86.6 % (GRPO) and 84.1 % (ScaleRL), means
           of seeds 0 to 4; the fitted curves are in docs/diagnose.md
"""

from ml_collections import ConfigDict

from configs import ablation, recipes

UPDATES = 8  # of a rollout step of the other rows


def scalerl(c: ConfigDict) -> None:
    """ScaleRL's method: one update a step, and sampling up to eight steps ahead (PipelineRL-8)."""
    c.train.prompts_per_step //= UPDATES
    c.train.num_steps *= UPDATES
    c.evaluation.every_steps *= UPDATES
    c.checkpoint.every_steps *= UPDATES
    c.optimizer.warmup_steps *= UPDATES
    recipes.scalerl(c)


ROWS = (ablation.grpo, ablation.dapo, scalerl)


def get_config(row: str = "dapo") -> ConfigDict:
    """Returns configs/ablation.py with the changes of a row."""
    change = ablation.change_of(row, ROWS)
    c = ablation.get_config()
    change(c)
    return c
