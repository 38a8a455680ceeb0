"""Writes trl_entropy.json: the tokens of top entropy by TRL's GRPOTrainer, and its loss on them.

Command: /tmp/trlenv/bin/python tests/goldens/make_trl_entropy.py, in an environment of its own with
torch==2.13.0 and trl==1.16.0. Read by `tests/algorithms/test_entropy.py`.

The methods of the trainer are called on random statistics of tokens in place of a model's. Numbers
are rounded before they are used, so that the file is what the trainer saw.
"""

import json
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl

PLACE = Path(__file__).with_name("trl_entropy.json")
SHARES = (0.2, 0.5, 0.05, 0.95, 0.29, 0.99)
BETA, CLIP_LOW, CLIP_HIGH, DUAL = 0.1, 0.2, 0.28, 3.0


def make_trainer(share: float, loss_type: str, statistics: Any) -> Any:
    """Returns what the two methods read of a trainer: one process, one micro-batch an update."""
    alone = types.SimpleNamespace(
        gather=lambda x: x,
        pad_across_processes=lambda x, **_: x,
        reduce=lambda x, **_: x,
        num_processes=1,
    )
    trainer = types.SimpleNamespace(
        accelerator=alone,
        args=types.SimpleNamespace(
            delta=DUAL, use_bias_correction_kl=False, steps_per_generation=1
        ),
        model=types.SimpleNamespace(training=True),
        top_entropy_quantile=share,
        loss_type=loss_type,
        epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        beta=BETA,
        max_completion_length=32,
        importance_sampling_level="token",
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (*statistics, None),
    )
    own = trl.GRPOTrainer.get_high_entropy_mask
    trainer.get_high_entropy_mask = lambda *args: own(trainer, *args)
    return trainer


def make_case(rng: np.random.Generator, share: float, loss_type: str, digits: int) -> dict:
    """Returns four responses in rows, their statistics, and what TRL makes of them."""
    B, T = 4, 10
    lengths = rng.integers(1, T + 1, B)
    mask = np.arange(T) < lengths[:, None]
    rounded = lambda x, digits=3: np.round(np.broadcast_to(x, (B, T)), digits)
    entropy = rounded(rng.exponential(0.5, (B, T)), digits)
    log_prob = rounded(-rng.exponential(1.0, (B, T)))
    old = rounded(log_prob + 0.3 * rng.standard_normal((B, T)))
    reference = rounded(log_prob + 0.3 * rng.standard_normal((B, T)))
    advantage = rounded(rng.standard_normal((B, 1)))
    tensor = lambda x: torch.tensor(np.asarray(x), dtype=torch.float32)
    logps = tensor(log_prob).requires_grad_()
    trainer = make_trainer(share, loss_type, (logps, tensor(entropy)))
    tokens, whole = torch.zeros((B, T), dtype=torch.long), torch.tensor(mask.astype(np.int64))
    inputs = dict(
        prompt_ids=tokens[:, :1],
        prompt_mask=whole[:, :1],
        completion_ids=tokens,
        completion_mask=whole,
        advantages=tensor(advantage[:, 0]),
        old_per_token_logps=tensor(old),
        ref_per_token_logps=tensor(reference),
        num_items_in_batch=whole.sum(),
    )
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    selected = trainer.get_high_entropy_mask(tensor(entropy), whole, 1 - share)
    flat = lambda x: [np.asarray(x)[i, :n].tolist() for i, n in enumerate(lengths)]
    return {
        "share": share,
        "loss_type": loss_type,
        "entropy": flat(entropy),
        "log_prob": flat(log_prob),
        "old": flat(old),
        "reference": flat(reference),
        "advantage": advantage[:, 0].tolist(),
        "selected": flat(selected.int()),
        "loss": round(loss.item(), 7),
        "gradient": flat(np.round(logps.grad.numpy().astype(np.float64), 7)),
    }


def main() -> None:
    rng = np.random.default_rng(0)
    both = [(share, digits) for share in SHARES for digits in (4, 1)]  # 1: many tokens tie
    cases = [
        make_case(rng, share, ("dapo", "grpo", "dr_grpo")[i % 3], digits)
        for i, (share, digits) in enumerate(both)
    ]
    out = {
        "version": f"trl {trl.__version__}, torch {torch.__version__}",
        "settings": dict(beta=BETA, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, clip_dual=DUAL),
        "cases": cases,
    }
    PLACE.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(f"{PLACE}: {PLACE.stat().st_size} bytes, {out['version']}")


if __name__ == "__main__":
    main()
