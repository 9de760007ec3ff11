"""The `chairlift` command as a person meets it: help, tables, errors in one line, exit statuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from config.describe import assemble, describe
from server import __version__, cli
from server.commands import doctor

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
    return subprocess.run(
        [sys.executable, "-m", "server", *arguments],
        cwd=ROOT,
        env=inherited,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def chairlift(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, since one of its own takes a second to start; in a terminal 100 wide."""

    def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("CHAIRLIFT_")]:
                patch.delenv(name)
            for name, value in ({"COLUMNS": "100"} | (environ or {})).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                cli.main(arguments)
        printed = capsys.readouterr()
        assert end.value.code is None or isinstance(end.value.code, int)
        return subprocess.CompletedProcess(arguments, end.value.code or 0, printed.out, printed.err)

    return run


@pytest.fixture
def output(chairlift: Run) -> Callable[..., str]:
    """What a command prints that succeeds."""

    def run(*arguments: str, environ: dict[str, str] | None = None) -> str:
        result = chairlift(*arguments, environ=environ)
        assert result.stderr == ""
        assert result.returncode == 0
        return result.stdout

    return run


def test_help_lists_the_commands(output: Callable[..., str]) -> None:
    text = output("--help")
    for command in ("serve", "config", "doctor", "pull", "version"):
        assert f"│ {command} " in text
    assert "CHAIRLIFT_MAX_NUM_SEQS" in text


def test_help_of_serve_has_every_setting_in_its_group(output: Callable[..., str]) -> None:
    text = output("serve", "--help")
    shown = [setting for setting in describe() if not setting.hidden]
    titles = dict.fromkeys(setting.group for setting in shown)
    places = [text.index(f"─ {title} ─") for title in titles]
    assert places == sorted(places)
    for setting in shown:
        assert setting.flag in text[text.index(f"─ {setting.group} ─") :]
    assert "--faults" not in text
    assert "--no-prefix-caching" in text
    assert "--kv-cache-memory BYTES" in text
    assert "[default: 64 on cpu, 256 on cuda]" in text


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["config", "show"], ["version"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from server.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def test_version(output: Callable[..., str]) -> None:
    assert output("version") == output("--version") == __version__ + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serv"], 'Unknown command "serv". Did you mean "serve"?'),
        (["serve", "--prot", "1"], "Unknown option: --prot. Did you mean --port?"),
        (["serve", "--port", "99999"], "Invalid value for --port: 99999 is not from 0 to 65535"),
        (["serve", "smollm2"], "smollm2"),
        (["config", "show", "--config", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
        (["config", "show", "--kv-cache-tokens", "1", "--kv-cache-memory", "1"], "leave one of them out"),
    ],
)
def test_mistakes_are_told_in_one_line(chairlift: Run, arguments: list[str], message: str) -> None:
    result = chairlift(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("chairlift: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_key_file_without_keys_is_told_before_the_model_loads(tmp_path: Path) -> None:
    result = start("serve", "--port", "0", "--api-key-file", str(tmp_path / "keys"))
    assert result.returncode == 1
    assert result.stderr.startswith(f"chairlift: --api-key-file: the API key file {tmp_path / 'keys'} cannot be read")
    assert result.stderr.count("\n") == 1


def test_traces_without_what_sends_them_are_told_before_the_model_loads() -> None:
    script = (
        "import sys\n"
        "from server.cli import main\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "try: main(['serve', '--port', '0', '--otlp-traces-endpoint', 'http://localhost:4318/v1/traces'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "chairlift: --otlp-traces-endpoint: traces are sent with OpenTelemetry, which is not"
    )
    assert "pip install '.[otel]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_model_is_told_before_torch_is_imported() -> None:
    result = start("serve", "--port", "0", "--model", "./missing")
    assert result.returncode == 1
    [loads, error] = result.stderr.splitlines()
    assert loads.startswith(f"Chairlift {__version__} loads ./missing")
    assert error == "chairlift: --model: ./missing: no such file or directory"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pull", "./missing"], "chairlift: ./missing: no such file or directory\n"),
        (
            ["pull", "smollm2", "--revision", "x"],
            "chairlift: smollm2 has no revisions (it is for Hugging Face ids only)\n",
        ),
    ],
)
def test_a_model_that_cannot_be_had(chairlift: Run, arguments: list[str], line: str) -> None:
    result = chairlift(*arguments)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line)


def test_pull_prints_where_the_model_is(output: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert output("pull", str(tmp_path)) == f"{tmp_path}\n"
    assert output("pull", environ={"CHAIRLIFT_MODEL": str(tmp_path)}) == f"{tmp_path}\n"


def test_config_show_tells_value_and_origin(output: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max_num_seqs = 3\nkv_cache_memory = '1.5GiB'")
    text = output("config", "show", "--port", "9", "--config", str(file), environ={"CHAIRLIFT_DTYPE": "float32"})
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}
    assert rows["port"] == "9 command line"
    assert rows["dtype"] == "float32 environment CHAIRLIFT_DTYPE"
    assert rows["max_num_seqs"] == f"3 file {file}"
    assert rows["kv_cache_memory"] == f"1610612736 (1.5 GiB) file {file}"
    assert rows["prefix_caching"] == "true default"
    assert rows["revision"] == "- default"
    assert rows.keys() >= {setting.name for setting in describe()}


def test_config_show_as_json(output: Callable[..., str]) -> None:
    rows = json.loads(output("config", "show", "--json", "--device", "cuda"))
    assert rows.keys() == {setting.name for setting in describe()}
    assert rows["max_num_seqs"] == {"value": 256, "origin": "preset cuda"}
    assert rows["prefix_caching"] == {"value": True, "origin": "default"}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_secrets_are_never_shown(output: Callable[..., str], form: list[str]) -> None:
    text = output("config", "show", *form, environ={"CHAIRLIFT_API_KEY": "s3cret-one,s3cret-two"})
    assert "s3cret" not in text
    assert "(2 hidden)" in text


def test_a_mistyped_variable_is_told(chairlift: Run) -> None:
    result = chairlift("config", "show", environ={"CHAIRLIFT_PRT": "1"})
    assert result.returncode == 0
    assert result.stderr == "chairlift: warning: CHAIRLIFT_PRT is no setting (did you mean CHAIRLIFT_PORT?)\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "server", "config", "show"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_doctor_tells_what_it_found_and_what_to_do(chairlift: Run, tmp_path: Path) -> None:
    result = chairlift("doctor", "--json", "--port", "0", "--device", "cuda:99", "--cache-dir", str(tmp_path / "new"))
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert findings.keys() >= {"python", "torch", "transformers", "device", "cpu", "threads", "memory", "port", "model"}
    assert all(finding["status"] == "ok" or finding["advice"] for finding in findings.values())
    assert findings["device"]["status"] == "fail"
    assert result.returncode == 1
    assert (findings["model"]["status"], findings["model"]["advice"][:14]) == ("warn", "chairlift pull")
    assert findings["cache"]["found"].startswith(str(tmp_path / "new"))
    assert findings["cache"]["status"] == "ok"
    assert not (tmp_path / "new").exists()  # looking leaves no traces


def test_doctor_looks_into_a_model_directory(tmp_path: Path) -> None:
    settings = assemble({"model": str(tmp_path)})
    [finding] = doctor._check_model(settings)
    assert (finding.status, finding.found) == ("fail", f"{tmp_path} holds no config.json and no *.safetensors")
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    [finding] = doctor._check_model(settings)
    assert (finding.status, finding.found) == ("ok", str(tmp_path))


def test_doctor_survives_a_check_that_breaks() -> None:
    def _check_the_broken(_: object) -> None:
        raise OSError("libgomp is gone")

    [finding] = doctor._run(_check_the_broken, None)
    assert (finding.check, finding.status) == ("the broken", "fail")
    assert "libgomp is gone" in finding.found
