"""Which source wins, where each value came from, and what is said when one is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from cyclopts import CycloptsError

import config.load
import config.otlp
from config.load import Loaded, load
from config.schema import Settings
from config.toml import SettingsError


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.load, "_has_gpu", lambda: False)


def changed(loaded: Loaded) -> dict[str, tuple[object, str]]:
    """Value and origin of what is neither a default nor from a preset."""
    return {
        name: (loaded.values[name], origin)
        for name, origin in loaded.origins.items()
        if origin != "default" and not origin.startswith("preset")
    }


def error(arguments: list[str], environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises((SettingsError, CycloptsError)) as caught:
        load(arguments, environ or {})
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_set_gives_the_defaults() -> None:
    loaded = load([], {})
    assert loaded.settings == Settings()
    assert changed(loaded) == {}
    assert loaded.warnings == ()


def test_each_source_goes_before_the_next(toml: Path) -> None:
    toml.write_text("port = 1\nhost = 'a'\nmax_num_seqs = 11\nblock-size = 16\n")
    environ = {"CHAIRLIFT_PORT": "2", "CHAIRLIFT_HOST": "b", "CHAIRLIFT_CONFIG": str(toml)}
    loaded = load(["--port", "3"], environ)
    assert changed(loaded) == {
        "port": (3, "command line"),
        "host": ("b", "environment CHAIRLIFT_HOST"),
        "max_num_seqs": (11, f"file {toml}"),
        "block_size": (16, f"file {toml}"),
    }
    assert loaded.origins["max_num_batched_tokens"] == "preset cpu"
    assert loaded.origins["model"] == "default"
    assert loaded.settings.server.port == 3
    assert loaded.settings.engine.scheduler.max_num_seqs == 11
    assert loaded.settings.engine.cache.block_size == 16


def test_the_command_line_names_another_file_than_the_environment(toml: Path) -> None:
    toml.write_text("port = 1")
    loaded = load(["--config", str(toml)], {"CHAIRLIFT_CONFIG": "/nowhere.toml"})
    assert changed(loaded) == {"port": (1, f"file {toml}")}


@pytest.mark.parametrize(
    ("device", "gpu", "environ", "preset", "max_num_seqs"),
    [
        ("auto", False, {}, "cpu", 64),
        ("auto", True, {}, "cuda", 256),
        ("auto", True, {"CUDA_VISIBLE_DEVICES": ""}, "cpu", 64),
        ("auto", True, {"CUDA_VISIBLE_DEVICES": "1"}, "cuda", 256),
        ("cpu", True, {}, "cpu", 64),
        ("cuda:1", False, {}, "cuda", 256),
    ],
)
def test_the_device_chooses_the_preset(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, environ: dict[str, str], preset: str, max_num_seqs: int
) -> None:
    monkeypatch.setattr(config.load, "_has_gpu", lambda: gpu)
    loaded = load(["--device", device], environ)
    assert loaded.origins["max_num_seqs"] == f"preset {preset}"
    assert loaded.settings.engine.scheduler.max_num_seqs == max_num_seqs


def test_every_source_goes_before_a_preset(toml: Path) -> None:
    toml.write_text("device = 'cuda'\nmax_num_seqs = 5")
    loaded = load(["--config", str(toml)], {"CHAIRLIFT_MAX_NUM_BATCHED_TOKENS": "6"})
    scheduler = loaded.settings.engine.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (5, 6)


def test_switches(toml: Path) -> None:
    toml.write_text("vllm_metrics = false\nprefix_caching = false")
    arguments = ["--config", str(toml), "--no-enable-chunked-prefill", "--prefix-caching"]
    settings = load(arguments, {"CHAIRLIFT_VLLM_METRICS": "yes"}).settings
    assert settings.engine.scheduler.enable_chunked_prefill is False
    assert settings.engine.cache.prefix_caching is True
    assert settings.server.vllm_metrics is True


def test_the_last_flag_counts() -> None:
    assert load(["--port", "1", "--port", "2"], {}).settings.server.port == 2


def test_an_empty_variable_counts_as_unset() -> None:
    assert changed(load([], {"CHAIRLIFT_API_KEY": "", "CHAIRLIFT_MODEL": ""})) == {}


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--prot", "1"], {}, "Unknown option: --prot. Did you mean --port?"),
        (["--port", "x"], {}, 'Invalid value for --port: "x" is not a whole number'),
        (["--port", "70000"], {}, "Invalid value for --port: 70000 is not from 0 to 65535"),
        (["--port"], {}, "Parameter --port requires an argument."),
        (["--device=gpu"], {}, 'Invalid value for --device: "gpu" is not auto, cpu, cuda or cuda:N'),
        (
            ["--dtype", "bfloat"],
            {},
            'Invalid value for --dtype: "bfloat" is not one of auto, float32, bfloat16, float16 '
            "(did you mean bfloat16?)",
        ),
        (["--kv-cache-memory", "4 apples"], {}, "4GiB, 500MB or 1.5g"),
        ([], {"CHAIRLIFT_PORT": "-1"}, "Invalid value for CHAIRLIFT_PORT: -1 is not from 0 to 65535"),
        ([], {"CHAIRLIFT_PREFIX_CACHING": "2"}, 'Invalid value for CHAIRLIFT_PREFIX_CACHING: "2" is not true or false'),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml: No such file or directory"),
        (
            ["--kv-cache-memory", "1GiB"],
            {"CHAIRLIFT_KV_CACHE_TOKENS": "5"},
            "kv_cache_memory (command line) and kv_cache_tokens (environment CHAIRLIFT_KV_CACHE_TOKENS) both set the "
            "size of the KV cache: leave one of them out",
        ),
    ],
)
def test_errors_name_what_is_wrong_and_what_would_be_right(
    arguments: list[str], environ: dict[str, str], message: str
) -> None:
    assert message in error(arguments, environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 1", '{file}: there is no setting "max_num_seq" (did you mean max_num_seqs?)'),
        ("max-num-seq = 1", '{file}: there is no setting "max-num-seq" (did you mean max_num_seqs?)'),
        ("config = 'x'", '{file}: there is no setting "config"'),
        ("[server]\nport = 1", "{file}: [server] is a table; settings stand at the top level: port = 8000"),
        ("port = [1]", "{file}: port takes one value, not a list"),
        ("port = 70000", "Invalid value for port in {file}: 70000 is not from 0 to 65535"),
        ("port = 1.5", 'Invalid value for port in {file}: "1.5" is not a whole number'),
        ("port = true", 'Invalid value for port in {file}: "True" is not a whole number'),
        ("dtype = 'x'", 'Invalid value for dtype in {file}: "x" is not one of auto, float32, bfloat16, float16'),
        ("port 1", "{file} is not TOML: "),
    ],
)
def test_errors_in_the_file_name_the_file(toml: Path, text: str, message: str) -> None:
    toml.write_text(text)
    assert error(["--config", str(toml)]).startswith(message.format(file=toml))


def test_unknown_variables_are_told_not_refused() -> None:
    loaded = load([], {"CHAIRLIFT_PRT": "1", "CHAIRLIFT_BANANA": "1", "HOME": "/"})
    assert loaded.warnings == (
        "CHAIRLIFT_BANANA is no setting",
        "CHAIRLIFT_PRT is no setting (did you mean CHAIRLIFT_PORT?)",
    )


def test_what_kubernetes_sets_for_a_service_called_chairlift_does_no_harm() -> None:
    environ = {
        "CHAIRLIFT_PORT": "tcp://10.0.0.7:8000",
        "CHAIRLIFT_SERVICE_HOST": "10.0.0.7",
        "CHAIRLIFT_SERVICE_PORT": "8000",
        "CHAIRLIFT_SERVICE_PORT_HTTP": "8000",
        "CHAIRLIFT_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "CHAIRLIFT_PORT_8000_TCP_PROTO": "tcp",
    }
    loaded = load([], environ)
    assert loaded.settings.server.port == 8000
    [warning] = loaded.warnings
    assert warning.startswith("CHAIRLIFT_PORT=tcp://10.0.0.7:8000 is ignored")


def test_keys_from_every_source(toml: Path) -> None:
    assert load(["--api-key", "a", "--api-key", "b"], {}).settings.access.api_key == ("a", "b")
    assert load([], {"CHAIRLIFT_API_KEY": "a, b"}).settings.access.api_key == ("a", "b")
    toml.write_text("api_key = ['a', 'b']")
    assert load(["--config", str(toml)], {}).settings.access.api_key == ("a", "b")


def test_the_cache_follows_the_platforms_rule() -> None:
    assert load([], {}).settings.engine.model.cache_dir is None
    loaded = load([], {"XDG_CACHE_HOME": "/x"})
    assert (loaded.values["cache_dir"], loaded.origins["cache_dir"]) == ("/x/chairlift", "environment XDG_CACHE_HOME")
    assert load(["--cache-dir", "/y"], {"XDG_CACHE_HOME": "/x"}).settings.engine.model.cache_dir == "/y"


TRACES, BASE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "url", "origin"),
    [
        ({BASE: "http://c:4318"}, "http://c:4318/v1/traces", f"environment {BASE}"),
        ({BASE: "https://c/otlp/"}, "https://c/otlp/v1/traces", f"environment {BASE}"),
        ({TRACES: "http://t:1/x", BASE: "http://c:4318"}, "http://t:1/x", f"environment {TRACES}"),
        ({"CHAIRLIFT_OTLP_TRACES_ENDPOINT": "http://o/", TRACES: "http://t:1/x"}, "http://o/", None),
        ({TRACES: "http://t:1/x", "OTEL_SDK_DISABLED": "true"}, None, "default"),
        ({TRACES: "http://t:1/x", "OTEL_TRACES_EXPORTER": "none"}, None, "default"),
        ({TRACES: "", BASE: ""}, None, "default"),
        ({TRACES: "http://t:1/x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http://t:1/x", None),
    ],
)
def test_traces_go_where_opentelemetrys_own_variables_say(
    environ: dict[str, str], url: str | None, origin: str | None
) -> None:
    loaded = load([], environ)
    assert loaded.settings.server.otlp_traces_endpoint == url
    assert loaded.origins["otlp_traces_endpoint"] == (origin or loaded.origins["otlp_traces_endpoint"])
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({TRACES: "c:4318"}, f'{TRACES} is ignored: "c:4318" is not a URL'),
        ({BASE: "grpc://c:4317"}, f'{BASE} is ignored: "grpc://c:4317/v1/traces" is not a URL'),
        ({BASE: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "sent by http/protobuf, not by grpc"),
    ],
)
def test_what_those_ask_for_in_vain_is_a_warning(environ: dict[str, str], message: str) -> None:
    loaded = load([], environ)
    assert loaded.settings.server.otlp_traces_endpoint is None
    [warning] = loaded.warnings
    assert message in warning


def test_so_it_is_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.otlp, "_PACKAGE", "no-such-package")
    loaded = load([], {TRACES: "http://t:1/x"})
    assert loaded.settings.server.otlp_traces_endpoint is None
    assert loaded.warnings == (f"{TRACES} is ignored: traces need OpenTelemetry (pip install '.[otel]')",)
    assert load(["--otlp-traces-endpoint", "http://t:1/x"], {}).settings.server.otlp_traces_endpoint == "http://t:1/x"


@pytest.mark.parametrize("url", ["localhost:4318", "http://localhost:4318", "grpc://localhost:4317/v1/traces"])
def test_a_url_for_traces_has_all_that_it_needs(url: str) -> None:
    assert "with its path, such as" in error(["--otlp-traces-endpoint", url])
