"""Measuring a model behind an inference server with prompt log-probabilities: vLLM, SGLang, llama-cpp-python."""

from kleash.engines.endpoints.engine import EndpointEngine, ServedModel, served_model
from kleash.engines.endpoints.http_client import JSONClient, check_url
from kleash.engines.endpoints.server import Endpoint, connect, find_model

__all__ = [
    "Endpoint",
    "EndpointEngine",
    "JSONClient",
    "ServedModel",
    "check_url",
    "connect",
    "find_model",
    "served_model",
]
