"""`chairlift bench`: how fast the engine is on this machine, without HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from config.load import Loaded, SettingsLoader
from server.terminal import fail, print_table, show_progress, warn

SETTINGS = frozenset(
    {
        "model", "revision", "dtype", "device", "max_model_len", "kernels", "fuse", "quantization", "num_threads",
        "cache_dir", "block_size", "kv_cache_memory", "kv_cache_tokens", "kv_cache_dtype", "max_num_batched_tokens",
    }
)  # fmt: skip
What = Literal["prefill", "decode", "load"]
EVERYTHING: tuple[What, ...] = ("prefill", "decode", "load")
_AT_LEAST_1 = Parameter(validator=Number(gte=1))
_SOME = Parameter(consume_multiple=True, negative_iterable=(), validator=Number(gte=1))


def register(app: App, loader: SettingsLoader) -> None:
    """Add the command."""
    app.command(loader.command(bench, only=SETTINGS))


def bench(  # noqa: PLR0913 - one for each flag
    loaded: Loaded,
    *what: What,
    prompt_lens: Annotated[tuple[int, ...], _SOME] = (128, 512, 1024),
    rows: Annotated[tuple[int, ...], _SOME] = (1, 8, 32, 64),
    context: Annotated[int, _AT_LEAST_1] = 200,
    steps: Annotated[int, _AT_LEAST_1] = 40,
    concurrency: Annotated[tuple[int, ...], _SOME] = (1, 32),
    requests_per_client: Annotated[int, _AT_LEAST_1] = 3,
    input_len: Annotated[int, _AT_LEAST_1] = 128,
    output_len: Annotated[int, _AT_LEAST_1] = 64,
    static: bool = False,
    seed: int = 0,
    json_file: Annotated[Path | None, Parameter(name="--json")] = None,
) -> int:
    """Measure the engine on this machine, without HTTP: prefill, decode steps, and a load of requests.

    Takes a minute or two with the default model on two cores. Nothing else should run meanwhile.

    Parameters
    ----------
    what
        Any of `prefill`, `decode` and `load`. All by default.
    prompt_lens
        Prompts of these lengths, in tokens, for prefill; the median of three each.
    rows
        Numbers of requests that decode in a step.
    context
        Tokens that each of them has, prompt and output.
    steps
        Decode steps to take the median of.
    concurrency
        Numbers of requests that are open at once, for the load: whoever is done makes room for the next.
    requests_per_client
        Requests of the load, for each of those that are open at once; but at least 8 in all.
    input_len
        Mean prompt of the load, in tokens; each is up to half of that longer or shorter.
    output_len
        Mean output of the load, likewise.
    static
        The load by static batching, too: padded waves of requests under transformers' own `generate()`.
    seed
        Of prompts and lengths.
    json_file
        Write all figures there.
    """
    from engine.bench.suite import BenchSpec, run_bench
    from engine.errors import EngineError
    from server import bench as report

    warn(loaded.warnings)
    chosen = what or EVERYTHING
    spec = BenchSpec(
        prompt_lens=prompt_lens if "prefill" in chosen else (),
        decode_rows=rows if "decode" in chosen else (),
        concurrency=concurrency if "load" in chosen else (),
        context_len=context,
        num_steps=steps,
        requests_per_client=requests_per_client,
        input_len=input_len,
        output_len=output_len,
        static=static,
        seed=seed,
    )
    try:
        with show_progress() as progress:
            results = run_bench(loaded.settings.engine, spec, progress)
    except EngineError as error:
        fail(str(error), setting=getattr(error, "setting", None), hint=getattr(error, "hint", None))
    print(report.headline(results.info))
    for title, table in report.tables(results):
        print(f"\n{title}")
        print_table(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(results), indent=2) + "\n")
    return 0
