"""The configuration: schema with defaults, its checks, the command line, config.json of models."""

from dapo_jax.config.schema import (
    Config,
    CorrectionConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PretrainConfig,
    RolloutConfig,
    SourceConfig,
    Statistic,
    model_config,
)

__all__ = ["Config", "CorrectionConfig", "DataConfig", "MeshConfig", "ModelConfig"]
__all__ += ["ObjectiveConfig", "OptimizerConfig", "PretrainConfig", "RolloutConfig"]
__all__ += ["SourceConfig", "Statistic", "model_config"]
