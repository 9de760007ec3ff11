"""From logits to tokens: the sampler, its arithmetic and its random numbers."""

from engine.sample.sampler import Sampler

__all__ = ["Sampler"]
