"""DAPO in JAX: reinforcement learning of language models on problems with checkable answers."""

from dapo_jax.api import (
    RunRecord,
    diagnose,
    evaluate,
    export,
    fit_curves,
    generate,
    load_config,
    load_sft_config,
    plan,
    report,
    score,
    sft,
    train,
)

__version__ = "0.1.0"
__all__ = ["RunRecord", "diagnose", "evaluate", "export", "fit_curves"]
__all__ += ["generate", "load_config", "load_sft_config", "plan", "report", "score", "sft", "train"]
