"""Outputs that follow a grammar: JSON schemas, regular expressions, choices, context-free grammars.

    compiler.py        grammars in, compiled ones out, by a thread of its own; the cache
    trial.py           each new grammar is tried in another process first (trial_process.py is what runs there)
    matcher.py         which tokens may come next, by llguidance; one Matcher for each request

Importing this imports neither numpy nor llguidance.
"""
