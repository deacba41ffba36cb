"""Settings: declared once (`schema` and its parts), validated (`fields`) and converted (`convert`)."""

from tformer_jax.config.convert import differences, flat, from_config_dict, load, save, to_config_dict, to_dict
from tformer_jax.config.data import DataConfig
from tformer_jax.config.decode import DecodeConfig, EmbedConfig
from tformer_jax.config.examples import FilterConfig, NoiseConfig
from tformer_jax.config.fields import ConfigError
from tformer_jax.config.layers import MoEConfig, RelativeConfig, RotaryConfig
from tformer_jax.config.metrics import lower_is_better
from tformer_jax.config.model import ModelConfig
from tformer_jax.config.parallel import MESH_AXES, MESH_PRESETS, ParallelConfig, read_mesh
from tformer_jax.config.schema import Config, EvalConfig
from tformer_jax.config.training import OptimConfig, TrainConfig

__all__ = [
    "MESH_AXES",
    "MESH_PRESETS",
    "Config",
    "ConfigError",
    "DataConfig",
    "DecodeConfig",
    "EmbedConfig",
    "EvalConfig",
    "FilterConfig",
    "MoEConfig",
    "ModelConfig",
    "NoiseConfig",
    "OptimConfig",
    "ParallelConfig",
    "RelativeConfig",
    "RotaryConfig",
    "TrainConfig",
    "differences",
    "flat",
    "from_config_dict",
    "load",
    "lower_is_better",
    "read_mesh",
    "save",
    "to_config_dict",
    "to_dict",
]
