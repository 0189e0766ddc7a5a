"""transformer2: Llama-like decoders with pluggable residual connections (depth) and local mixing (sequence).

Importing it registers the model family with transformers' Auto classes.
"""

if __name__ != "transformer2":
    raise ImportError("Import this package as `transformer2` (install it first: pip install -e .), not by its folder.")

import transformers

from . import modeling_transformer2 as _modeling
from .configuration_transformer2 import Transformer2Config
from .modeling_transformer2 import (
    AUTO_MAP,
    Transformer2ForCausalLM,
    Transformer2ForQuestionAnswering,
    Transformer2ForSequenceClassification,
    Transformer2ForTokenClassification,
    Transformer2Model,
    Transformer2PreTrainedModel,
)
from .variants import LOCAL_MIXERS, RESIDUALS

__version__ = "0.1.0"

transformers.AutoConfig.register("transformer2", Transformer2Config, exist_ok=True)
Transformer2Config.register_for_auto_class()
for _auto_class, _name in AUTO_MAP.items():
    _model_class = getattr(_modeling, _name)
    getattr(transformers, _auto_class).register(Transformer2Config, _model_class, exist_ok=True)
    _model_class.register_for_auto_class(_auto_class)

__all__ = [
    "LOCAL_MIXERS",
    "RESIDUALS",
    "Transformer2Config",
    "Transformer2ForCausalLM",
    "Transformer2ForQuestionAnswering",
    "Transformer2ForSequenceClassification",
    "Transformer2ForTokenClassification",
    "Transformer2Model",
    "Transformer2PreTrainedModel",
]
