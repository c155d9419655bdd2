"""Language models for comparison: loading pairs, reading sources, generation, scoring, reference caches."""

from kleash.models.cache.reference_cache import ReferenceCache
from kleash.models.cache.stored_reference import (
    StoredReference,
    finish_cache,
    head_tensors,
    save_rounding_columns,
)
from kleash.models.checkpoints.resolution import Checkpoint, find_checkpoint
from kleash.models.generation import Sampling, generate
from kleash.models.heads import ExtractedHead, extract_head, logit_discrepancy
from kleash.models.keyed_draws import SAMPLER, draw, exponentials
from kleash.models.live_models import at_rest, live_model
from kleash.models.lockstep import in_lockstep, turns_of
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import (
    Loading,
    load_beside,
    load_pair,
    load_pair_with,
    load_reference,
    pair_models,
)
from kleash.models.scoring import checked_reader, score, score_against_float32, score_batched_against_single
from kleash.models.sequences import (
    Prompt,
    TokenSequence,
    batch_by_length,
    hash_tokens,
)
from kleash.models.sources.documents import count_documents, read_text, resolve_window
from kleash.models.sources.prompts import read_prompts, tokenise_prompts
from kleash.models.sources.responses import read_responses
from kleash.models.sources.source_files import Source, find_source, source_path
from kleash.models.sources.source_notes import describe_source
from kleash.models.tokenizers import TokenizerMismatchError, compare_tokenizers, token_count, token_texts

__all__ = [
    "SAMPLER",
    "Checkpoint",
    "ExtractedHead",
    "Loading",
    "Model",
    "Pair",
    "Prompt",
    "ReferenceCache",
    "Sampling",
    "Source",
    "StoredReference",
    "TokenSequence",
    "TokenizerMismatchError",
    "at_rest",
    "batch_by_length",
    "checked_reader",
    "compare_tokenizers",
    "count_documents",
    "describe_source",
    "draw",
    "exponentials",
    "extract_head",
    "find_checkpoint",
    "find_source",
    "finish_cache",
    "generate",
    "hash_tokens",
    "head_tensors",
    "in_lockstep",
    "live_model",
    "load_beside",
    "load_pair",
    "load_pair_with",
    "load_reference",
    "logit_discrepancy",
    "pair_models",
    "read_prompts",
    "read_responses",
    "read_text",
    "resolve_window",
    "save_rounding_columns",
    "score",
    "score_against_float32",
    "score_batched_against_single",
    "source_path",
    "token_count",
    "token_texts",
    "tokenise_prompts",
    "turns_of",
]
