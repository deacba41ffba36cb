from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tformer_jax import models as models
from tformer_jax import nn as nn
from tformer_jax.api import Chat as Chat
from tformer_jax.api import Request as Request
from tformer_jax.api import Run as Run
from tformer_jax.api import load as load
from tformer_jax.config import Config as Config
from tformer_jax.config import DataConfig as DataConfig
from tformer_jax.config import DecodeConfig as DecodeConfig
from tformer_jax.config import EmbedConfig as EmbedConfig
from tformer_jax.config import EvalConfig as EvalConfig
from tformer_jax.config import ModelConfig as ModelConfig
from tformer_jax.config import OptimConfig as OptimConfig
from tformer_jax.config import ParallelConfig as ParallelConfig
from tformer_jax.config import TrainConfig as TrainConfig
from tformer_jax.notebook import configs as configs
from tformer_jax.notebook.configs import help as help
from tformer_jax.notebook.exports import export as export
from tformer_jax.notebook.parts import batches as batches
from tformer_jax.notebook.parts import init_state as init_state
from tformer_jax.notebook.parts import save_run as save_run
from tformer_jax.notebook.parts import train_step as train_step
from tformer_jax.notebook.training import train as train

__version__: str

def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]: ...

class CallablePackage(ModuleType): ...
