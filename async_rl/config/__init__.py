"""The config of a run: its values (`schema`), rules that span several of them (`rules`), and its files (`compose`)."""

from async_rl.config.compose import (
    CONFIGS,
    RECIPES,
    build_config,
    composed_values,
    load_config,
    plain_values,
    preset_names,
    recipe_overrides,
)
from async_rl.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ConfigError,
    MismatchConfig,
    ModelConfig,
    QueueConfig,
    RunConfig,
    WarmStartConfig,
)

__all__ = [
    "CONFIGS",
    "RECIPES",
    "CheckpointConfig",
    "ClusterConfig",
    "ConfigError",
    "MismatchConfig",
    "ModelConfig",
    "QueueConfig",
    "RunConfig",
    "WarmStartConfig",
    "build_config",
    "composed_values",
    "load_config",
    "plain_values",
    "preset_names",
    "recipe_overrides",
]
