"""Language models for comparison: loading pairs, reading sources, generation, scoring, reference caches."""

from kleash.jobs.option_groups import Loading, Sampling
from kleash.models.cache.reference_cache import ReferenceCache
from kleash.models.cache.stored_reference import StoredReference
from kleash.models.generation import generate
from kleash.models.keyed_draws import draw
from kleash.models.live_models import at_rest, live_model
from kleash.models.lockstep import in_lockstep, turns_of
from kleash.models.pair import Model, Pair
from kleash.models.pair_loading import load_beside, load_pair, load_reference, pair_models
from kleash.models.scoring import score
from kleash.models.tokenizers import TokenizerMismatchError
from kleash.sources.documents import read_text
from kleash.sources.files import Source, describe_source, find_source
from kleash.sources.prompts import read_prompts, tokenise_prompts
from kleash.sources.responses import read_responses
from kleash.sources.sequences import Prompt, TokenSequence

__all__ = [
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
    "describe_source",
    "draw",
    "find_source",
    "generate",
    "in_lockstep",
    "live_model",
    "load_beside",
    "load_pair",
    "load_reference",
    "pair_models",
    "read_prompts",
    "read_responses",
    "read_text",
    "score",
    "tokenise_prompts",
    "turns_of",
]
