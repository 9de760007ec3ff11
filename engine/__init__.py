"""Chairlift's engine: continuous batching over a transformers model. Runs bare, with torch and transformers only.

Importing this package does not import torch; making an engine does.
"""

from engine.client import AsyncEngine, Chunk, Usage
from engine.core import ModelInfo
from engine.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    EngineStopped,
    ModelError,
    Overloaded,
    RequestError,
)
from engine.llm import Completion, LLMEngine
from engine.machine import let_idle_threads_sleep
from engine.messages import Deadlines, EngineStats, StepReport, StepStats
from engine.params import GrammarSpec, SamplingParams
from engine.plan import TokenLogprobs
from engine.request import FinishReason

let_idle_threads_sleep()  # before torch is there

__all__ = [
    "AsyncEngine",
    "Chunk",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "Deadlines",
    "EngineDead",
    "EngineError",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "GrammarSpec",
    "LLMEngine",
    "ModelError",
    "ModelInfo",
    "Overloaded",
    "RequestError",
    "SamplingParams",
    "StepReport",
    "StepStats",
    "TokenLogprobs",
    "Usage",
]
