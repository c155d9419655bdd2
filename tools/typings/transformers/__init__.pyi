# For pyright: the names of transformers that kleash and its tools import, and TrainingArguments, a base of TRL's.
# transformers itself brings them by `from .models import *`, for which 2 500 files are read: a third of pyright's time.
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation.logits_process import MinPLogitsWarper as MinPLogitsWarper
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor,
)
from transformers.generation.logits_process import SequenceBiasLogitsProcessor as SequenceBiasLogitsProcessor
from transformers.generation.logits_process import TopKLogitsWarper as TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper as TopPLogitsWarper
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForMultimodalLM as AutoModelForMultimodalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer import Trainer as Trainer
from transformers.trainer_callback import TrainerCallback as TrainerCallback
from transformers.training_args import TrainingArguments as TrainingArguments
from transformers.utils import logging as logging
