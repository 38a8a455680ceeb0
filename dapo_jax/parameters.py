"""What the choices of a config stand for: the fields of `config.objective` that each of them reads
(one that nothing reads must be None), and scorers with their weights."""

import math

# The parameters that each policy loss and each advantage read; those in brackets may be None.
LOSS_PARAMETERS: dict[str, tuple[str, ...]] = {
    "ppo-clip": ("clip_low", "clip_high", "[clip_dual]"),
    "gspo": ("clip_low", "clip_high"),
    "gspo-token": ("clip_low", "clip_high"),
    "gmpo": ("clip_low", "clip_high"),
    "cispo": ("clip_low", "clip_high"),
    "sapo": ("tau_positive", "tau_negative"),
    "dppo-tv": ("clip_low", "clip_high", "ratio_cap"),
    "dppo-kl": ("clip_low", "clip_high", "ratio_cap"),
    "policy-gradient": (),
    "dro": ("dro_beta",),
    "clip-cov": ("clip_low", "clip_high"),
    "kl-cov": ("cov_kl_coefficient",),
}
# What the choice of tokens reads besides.
SELECTION_PARAMETERS: dict[str, tuple[str, ...]] = {
    "clip-cov": ("cov_share", "cov_low", "cov_high"),
    "kl-cov": ("cov_share",),
}
ADVANTAGE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "grpo": ("normalise_std", "std_ddof"),
    "grpo-process": ("normalise_std", "std_ddof", "outcome_as_step"),
    "pass-at-k": ("normalise_std", "std_ddof"),
    "gdpo": ("component_weights", "normalise_std", "std_ddof"),
    "lite-ppo": ("std_ddof",),
    "rloo": (),
    "opo": (),
    "remax": (),
    "maxrl": (),
    "gpg": ("gpg_norm",),
    "reinforce++": ("gamma",),
    "reinforce++-baseline": (),
    "gae": ("gamma", "gae_lambda"),
}

# What `config.correction.reject` may name: how a divergence is reduced, and which.
STATISTICS = (
    "token-k1", "token-k2", "token-k3", "seq-sum-k1", "seq-sum-k2", "seq-sum-k3",
    "seq-mean-k1", "seq-mean-k2", "seq-mean-k3", "seq-max-k2", "seq-max-k3",
)  # fmt: skip


def parse_scorers(text: str) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each scorer of a `scorer` field: "math_dapo", or several with weights,
    "math_dapo + 0.1 * answer_format".

    Raises:
        ValueError: the text is not such a sum.
    """
    found = []
    for term in text.split(" + "):
        weight, times, name = term.rpartition("*")
        value = float(weight.strip()) if times else 1.0  # float raises with what it was given
        if not name.strip() or not math.isfinite(value) or value == 0:
            raise ValueError(f"{term.strip()!r} is not a scorer, nor weight * scorer")
        found.append((name.strip(), value))
    if len(dict(found)) < len(found):
        raise ValueError("a scorer is named twice")
    return tuple(found)
