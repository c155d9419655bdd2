"""Measuring a model behind an inference server with prompt log-probabilities: vLLM, SGLang."""

from kleash.engines.endpoints.engine import EndpointEngine, ServedModel, served_model
from kleash.engines.endpoints.http_client import JSONClient, server_root
from kleash.engines.endpoints.server import Endpoint, connect, find_model

__all__ = [
    "Endpoint",
    "EndpointEngine",
    "JSONClient",
    "ServedModel",
    "connect",
    "find_model",
    "served_model",
    "server_root",
]
