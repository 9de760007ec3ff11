"""Kernels in plain C for x86-64: AVX2, AVX-512, bfloat16 products and AMX, chosen at run time.

`csrc/` holds the C sources, `library` loads them, the other modules are the Python side of one kernel each. Importing
this package loads nothing.
"""
