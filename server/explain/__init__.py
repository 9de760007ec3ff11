"""`chairlift explain`: static and continuous batching side by side, on a real model, as text and as a picture.

jobs      the prompts and their caps
run       both ways over the same weights, and whether their outputs agree
timeline  what each way computed, step by step: one form for both, so that they can be compared (pure)
mask      who may attend to whom in one step (pure)
report    the text                         picture   the PNG
"""
