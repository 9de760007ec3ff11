"""Measuring the engine offline: what `chairlift bench` runs. Nothing that serves imports this.

    memory   what a step must read, and how fast this machine reads
    steps    prefill at given lengths, decoding at given rows and context
    parts    where a decode step's time goes
    load     a closed loop of requests, by continuous and by static batching

Everything runs in the caller's thread, which must be the one that has built the engine.
"""
