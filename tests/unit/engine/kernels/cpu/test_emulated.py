"""The tests of this folder once more, with AVX-512 in software: what other processors run is tested on every host."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cpu_kernels import AVX512_EMULATED, SOURCES, copy_without_avx512

HERE = Path(__file__).parent
RUN = """
import sys
from pathlib import Path
import pytest
from engine.kernels.cpu import library
library.DIRECTORY = Path(sys.argv[1])
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def compile_source(source: Path) -> Path:
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-Wno-psabi"]
    if source.name.startswith("avx512"):
        flags += AVX512_EMULATED
    elif source.name == "run.c":
        flags.append("-D__builtin_cpu_supports(name)=1")
    target = source.with_suffix(".o")
    if source.name == "amx.c":  # nobody calls it here, so it may be as it is
        source = SOURCES / source.name
    subprocess.run(["cc", *flags, "-c", str(source), "-o", str(target)], check=True)
    return target


@pytest.mark.slow
def test_avx512_in_software(tmp_path: Path) -> None:
    sources = sorted(copy_without_avx512(SOURCES, tmp_path / "csrc").glob("*.c"))
    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_source, sources))
    library = tmp_path / "_kernels.so"
    subprocess.run(["cc", "-shared", *map(str, objects), "-o", str(library), "-Wl,-z,undefs", "-lm"], check=True)
    files = [str(HERE / name) for name in ("test_linear.py", "test_attention.py", "test_pointwise.py", "test_amx.py")]
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), "-m", "not slow", *files],
        env=os.environ | {"EMULATE_AVX512": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name in ("avx512", "avx512bf16"):
        assert f"has no {name}\n" not in result.stdout
