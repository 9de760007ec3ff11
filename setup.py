"""Builds the C kernels, beside what pyproject.toml says. They are optional: without a compiler, or on another processor
than x86-64, the install goes on without them and the reference kernels are used."""

import platform
from glob import glob

from setuptools import Extension, setup

SOURCES = "engine/kernels/cpu/csrc"

CPU_KERNELS = Extension(
    "engine.kernels.cpu._kernels",
    sources=sorted(glob(f"{SOURCES}/*.c")),
    depends=sorted(glob(f"{SOURCES}/*.h")),
    # No contraction: each sum is written as it is computed, so that every code path rounds alike.
    extra_compile_args=[
        "-std=gnu11",
        "-O3",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fopenmp",
        "-Wall",
        "-Wextra",
        "-g0",
    ],
    # Not linked with OpenMP: its symbols are those of the runtime that torch has loaded, whatever its file is called.
    extra_link_args=["-Wl,-z,undefs"],
    optional=True,
)

is_supported = platform.system() == "Linux" and platform.machine() == "x86_64"
setup(ext_modules=[CPU_KERNELS] if is_supported else [])
