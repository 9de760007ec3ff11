"""Where the settings come from: defaults < preset < TOML file < CHAIRLIFT_* environment < command line.

The only reader of os.environ. cyclopts parses the command line, draws the help and converts. It was chosen over
jsonargparse and pydantic-settings because it keeps each value's source until after the conversion, so that errors and
`chairlift config show` can name it. The environment, the file and the preset only add tokens to arguments that have
none yet: that is the whole precedence.

Of OpenTelemetry's own variables this reads those that say whether traces are made, and where they go (`config.otlp`).
The others are of its SDK, which reads them itself, as huggingface_hub reads `HF_*` and OpenMP `OMP_*`.

    cli.main -> cyclopts.App(config=loader) -> loader(...)  adds tokens, notes their sources
                    command function        <- loader.command(function)  converted values -> Loaded
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclopts import App, Argument, ArgumentCollection, Token

from config import otlp
from config.describe import ENV_PREFIX, Setting, assemble, describe
from config.flags import config_parameter, setting_parameter
from config.schema import Settings
from config.toml import PRESET_DIR, SettingsError, read_toml
from config.values import did_you_mean

CONFIG_ENV = ENV_PREFIX + "CONFIG"
DEFAULT = "default"
_KUBERNETES = re.compile(ENV_PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and where each value came from."""

    settings: Settings
    values: Mapping[str, Any]
    """The same values by `Setting.name`."""
    origins: Mapping[str, str]
    """By `Setting.name`: `command line`, `environment CHAIRLIFT_PORT`, `file server.toml`, `preset cuda`, `default`."""
    warnings: tuple[str, ...] = ()
    """What looks like a mistake but does no harm, a line each."""


class SettingsLoader:
    """Gives the commands of one cyclopts App their settings. Made anew for each run of the program."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._origins: dict[str, str] = {}
        self._warnings: list[str] = []

    def command(self, run: Callable[..., int], *, only: Collection[str] | None = None) -> Callable[..., int]:
        """`run(loaded, ...)` as a function for `App.command`: its own arguments, --config, and the settings.

        `only` names the settings that this command needs; by default it gets flags for all of them. The others have
        their defaults.
        """
        settings = [setting for setting in describe() if only is None or setting.name in only]
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

        @functools.wraps(run)
        def call(*args: Any, **arguments: Any) -> int:
            arguments.pop("config", None)
            values = {setting.name: arguments.pop(setting.name, setting.default) for setting in settings}
            return run(self._finish(values), *args, **arguments)

        parameters = [*own, config_parameter(), *map(setting_parameter, settings)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add what the other sources say. cyclopts calls this between parsing the command line and converting it."""
        by_flag = {argument.name: argument for argument in arguments}
        if "--config" not in by_flag:  # a command without settings
            return
        config = by_flag["--config"]
        self._warnings = list(_unknown_variables(self._environ))
        self._add_environment(by_flag)
        if config.tokens:
            _add_file(by_flag, Path(config.tokens[0].value))
        _add_preset(by_flag, self._environ)
        self._origins = {
            setting.name: _origin(by_flag[setting.flag].tokens[0])
            for setting in describe()
            if setting.flag in by_flag and by_flag[setting.flag].tokens
        }

    def _add_environment(self, by_flag: Mapping[str, Argument]) -> None:
        if (path := self._environ.get(CONFIG_ENV)) and not by_flag["--config"].tokens:
            by_flag["--config"].append(Token(keyword=CONFIG_ENV, value=path, source="environment"))
        for setting in describe():
            value = self._environ.get(setting.env)
            if not value:  # empty counts as unset: compose files and shells have no better way to say so
                continue
            if _set_by_kubernetes(setting.env, value):
                self._warnings.append(f"{setting.env}={value} is ignored: Kubernetes sets it for a Service's name")
                continue
            texts = value.split(",") if setting.kind == "texts" else [value]
            _add(by_flag, setting, map(str.strip, texts), keyword=setting.env, source=f"environment {setting.env}")

    def _finish(self, values: dict[str, Any]) -> Loaded:
        """Check what concerns several settings, and fill in what follows from the machine."""
        origins = {name: self._origins.get(name, DEFAULT) for name in values}
        if values.get("kv_cache_memory") is not None and values.get("kv_cache_tokens") is not None:
            told = " and ".join(f"{name} ({origins[name]})" for name in ("kv_cache_memory", "kv_cache_tokens"))
            raise SettingsError(f"{told} both set the size of the KV cache: leave one of them out")
        if "cache_dir" in values and values["cache_dir"] is None and (xdg := self._environ.get("XDG_CACHE_HOME")):
            values["cache_dir"] = str(Path(xdg) / "chairlift")
            origins["cache_dir"] = "environment XDG_CACHE_HOME"
        traces = "otlp_traces_endpoint"
        if traces in values and values[traces] is None and (found := otlp.find(self._environ)):
            if found.problem is None:
                values[traces], origins[traces] = found.url, f"environment {found.variable}"
            else:
                self._warnings.append(f"{found.variable} is ignored: {found.problem}")
        return Loaded(assemble(values), values, origins, tuple(self._warnings))


def load(arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """The settings for these command-line arguments. Raises SettingsError or cyclopts.CycloptsError.

    For programs that embed the server; the `chairlift` command itself hands its commands to a SettingsLoader.
    """
    loader = SettingsLoader(environ)
    loaded: list[Loaded] = []

    def keep(result: Loaded) -> int:
        loaded.append(result)
        return 0

    app = App(config=loader, result_action="return_value", print_error=False, exit_on_error=False)
    app.default(loader.command(keep))
    app(list(arguments))
    return loaded[0]


def _add(by_flag: Mapping[str, Argument], setting: Setting, texts: Iterable[str], *, keyword: str, source: str) -> None:
    """Give a setting's argument these values, unless a source that goes before has given it some."""
    argument = by_flag.get(setting.flag)
    if argument is None or argument.tokens:
        return
    for index, text in enumerate(texts):
        argument.append(Token(keyword=keyword, value=text, source=source, index=index))


def _add_file(by_flag: Mapping[str, Argument], path: Path) -> None:
    known = {setting.name: setting for setting in describe()}
    for key, value in read_toml(path).items():
        setting = known.get(key.replace("-", "_"))
        if isinstance(value, dict):
            raise SettingsError(f"{path}: [{key}] is a table; settings stand at the top level: port = 8000")
        if setting is None:
            raise SettingsError(f'{path}: there is no setting "{key}"{did_you_mean(key.replace("-", "_"), known)}')
        if isinstance(value, list) and setting.kind != "texts":
            raise SettingsError(f"{path}: {key} takes one value, not a list")
        texts = map(str, value if isinstance(value, list) else [value])
        _add(by_flag, setting, texts, keyword=f"{key} in {path}", source=f"file {path}")


def _add_preset(by_flag: Mapping[str, Argument], environ: Mapping[str, str]) -> None:
    device = by_flag.get("--device")
    if device is None:
        return
    name = _preset_for(device.tokens[0].value if device.tokens else "auto", environ)
    known = {setting.name: setting for setting in describe()}
    for key, value in read_toml(PRESET_DIR / f"{name}.toml").items():
        _add(by_flag, known[key], [str(value)], keyword=key, source=f"preset {name}")


def _preset_for(device: str, environ: Mapping[str, str]) -> str:
    """`cpu` or `cuda`. For `auto` it is a guess, which costs speed only if it is wrong."""
    if device != "auto":
        return "cuda" if device.startswith("cuda") else "cpu"
    hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if not hidden and _has_gpu() else "cpu"


def _has_gpu() -> bool:
    """Whether there is an NVIDIA GPU and a torch for it; without importing torch, which takes seconds."""
    present = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()  # the second is Windows' WSL
    try:
        return present and not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _origin(token: Token) -> str:
    return "command line" if token.source == "cli" else token.source


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """A warning for each CHAIRLIFT_* variable that is no setting. Not an error: others may share the environment."""
    known = {setting.env for setting in describe()} | {CONFIG_ENV}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known and not _set_by_kubernetes(name, environ[name]):
            yield f"{name} is no setting{did_you_mean(name, known, prefix=ENV_PREFIX)}"


def _set_by_kubernetes(name: str, value: str) -> bool:
    """Whether this is a variable that pods get for a Service called `chairlift`; CHAIRLIFT_PORT is among them."""
    return (name == ENV_PREFIX + "PORT" and "://" in value) or _KUBERNETES.fullmatch(name) is not None
