"""The tests of this folder once more, with the C kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.cpu import library

HERE = Path(__file__).parent
SOURCES = Path(library.__file__).parent / "csrc"
RUN = """
import sys
from pathlib import Path
import pytest
from engine.kernels.cpu import library
library.DIRECTORY = Path(sys.argv[1])
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_kernels_touch_only_what_is_theirs(tmp_path: Path) -> None:
    flags = ["-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared"]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wl,-z,undefs"]
    sources = sorted(map(str, SOURCES.glob("*.c")))
    subprocess.run(["gcc", *flags, *sanitize, *sources, "-o", str(tmp_path / "_kernels.so")], check=True)
    asan, ubsan = (
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    )
    files = [str(HERE / name) for name in ("test_linear.py", "test_attention.py", "test_pointwise.py")]
    files.append(str(HERE.parents[1] / "sample" / "test_sampler.py"))
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *files],
        env=os.environ | {"LD_PRELOAD": f"{asan}:{ubsan}", "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
