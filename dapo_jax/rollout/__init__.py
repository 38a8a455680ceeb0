"""Rollouts: the JetStream engine around the decoder, and the loop that generates scored groups.

Letters of dimensions that have another meaning here than in `dapo_jax.types`:

    R  shards of the slots       B  decode slots of a shard     E  requests of a shard
    P  prompts of a prefill      U  pages of the pool           J  pages of a page table
    A  tokens of a page          W  samples to cancel           k  tokens of a decode call
"""

from dapo_jax.rollout.admission import GenerationSettings
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import DynamicSamplingState, open_queue, take_kept
from dapo_jax.rollout.engine import DecoderEngine, make_engine
from dapo_jax.rollout.engine_config import EngineConfig, make_engine_config
from dapo_jax.rollout.jetstream import DecodeOutput
from dapo_jax.rollout.prompt_queue import Outcome, ProblemList, PromptQueue
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.scheduler import GenerationLoop, RolloutStats, generate

__all__ = [
    "DecodeOutput",
    "DecoderEngine",
    "DynamicSamplingState",
    "EngineConfig",
    "GenerationLoop",
    "GenerationSettings",
    "Outcome",
    "ProblemList",
    "PromptQueue",
    "RolloutCollector",
    "RolloutStats",
    "SamplingParams",
    "generate",
    "make_engine",
    "make_engine_config",
    "open_queue",
    "take_kept",
]
