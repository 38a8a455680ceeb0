"""Rollouts: the JetStream engine around the decoder, and the loop that generates scored groups."""

from dapo_jax.rollout.admission import GenerationRequest
from dapo_jax.rollout.collector import RolloutCollector
from dapo_jax.rollout.dynamic_sampling import SamplingState, open_queue, take_informative
from dapo_jax.rollout.engine import DecoderEngine, make_engine
from dapo_jax.rollout.engine_config import EngineConfig, make_engine_config
from dapo_jax.rollout.jetstream import DecodeOutput
from dapo_jax.rollout.prompt_queue import Outcome, ProblemList, PromptQueue
from dapo_jax.rollout.sampling import SamplingParams
from dapo_jax.rollout.scheduler import GenerationLoop, RolloutStats, generate

__all__ = [
    "DecodeOutput",
    "DecoderEngine",
    "EngineConfig",
    "GenerationLoop",
    "GenerationRequest",
    "Outcome",
    "ProblemList",
    "PromptQueue",
    "RolloutCollector",
    "RolloutStats",
    "SamplingParams",
    "SamplingState",
    "generate",
    "make_engine",
    "make_engine_config",
    "open_queue",
    "take_informative",
]
