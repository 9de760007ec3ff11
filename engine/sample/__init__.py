"""From logits to tokens: the sampler, its arithmetic and its random numbers."""

from engine.sample.sampler import SampleOutput, Sampler

__all__ = ["SampleOutput", "Sampler"]
