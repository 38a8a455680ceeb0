"""The configuration: schema with defaults, its checks, the command line, config.json of models."""

from dapo_jax.config.schema import (
    CheckpointConfig,
    Config,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    DynamicSamplingConfig,
    EvaluationConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PretrainConfig,
    RewardConfig,
    RolloutConfig,
    SourceConfig,
    Statistic,
    TrainConfig,
    model_config,
)

__all__ = [
    "CheckpointConfig", "Config", "CorrectionConfig", "CriticConfig", "DataConfig",
    "DynamicSamplingConfig", "EvaluationConfig", "LogConfig", "MeshConfig", "ModelConfig",
    "ObjectiveConfig", "OptimizerConfig", "PretrainConfig", "RewardConfig", "RolloutConfig",
    "SourceConfig", "Statistic", "TrainConfig", "model_config",
]  # fmt: skip
