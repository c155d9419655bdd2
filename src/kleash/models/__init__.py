"""Two language models that can be compared: loading, reading sources, answering prompts, scoring."""

from kleash.models.adapters.peft_adapters import require_unchanged_base
from kleash.models.cache.reference_cache import ReferenceCache
from kleash.models.cache.stored_reference import (
    StoredReference,
    finish,
    head_tensors,
    save_rounding,
)
from kleash.models.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.models.generation import Sampling, generate
from kleash.models.heads import Anatomy, disagreement, take_apart
from kleash.models.keyed_draws import SAMPLER, draw, exponentials
from kleash.models.live_models import at_rest, live_model
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import Loading, fit_together, load_beside, load_pair, load_reference
from kleash.models.scoring import finite_reader, score, score_against_alone, score_in_float32
from kleash.models.sequences import (
    Prompt,
    TokenSequence,
    hash_tokens,
    length_batches,
    retokenisation_warnings,
)
from kleash.models.sources.documents import count_documents, read_text, window_and_stride
from kleash.models.sources.prompts import column_counts, prompts_of, read_prompts
from kleash.models.sources.responses import read_responses
from kleash.models.sources.source_files import source_path
from kleash.models.tokenizers import TokenizerMismatchError, compare_tokenizers, token_count, token_texts

__all__ = [
    "SAMPLER",
    "Anatomy",
    "Checkpoint",
    "Loading",
    "Model",
    "Pair",
    "Prompt",
    "ReferenceCache",
    "Sampling",
    "StoredReference",
    "TokenSequence",
    "TokenizerMismatchError",
    "at_rest",
    "column_counts",
    "compare_tokenizers",
    "count_documents",
    "disagreement",
    "draw",
    "exponentials",
    "find_checkpoint",
    "finish",
    "finite_reader",
    "fit_together",
    "generate",
    "hash_tokens",
    "head_tensors",
    "length_batches",
    "live_model",
    "load_beside",
    "load_pair",
    "load_reference",
    "prompts_of",
    "read_prompts",
    "read_responses",
    "read_text",
    "require_unchanged_base",
    "retokenisation_warnings",
    "save_rounding",
    "score",
    "score_against_alone",
    "score_in_float32",
    "source_path",
    "take_apart",
    "token_count",
    "token_texts",
    "window_and_stride",
]
