"""What no source of ours may hold: ways to run what others have sent, and checks that `python -O` leaves out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("config", "engine", "server", "loadtest")

RUNS_CODE = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "zmq", "xmlrpc"})
"""Modules that make objects, and so code, of bytes; zmq, whose `recv_pyobj` does."""

CALLS = frozenset({"eval", "exec", "compile", "__import__"})
"""Functions of Python's that run text."""

METHODS = frozenset(
    {("torch", "load"), ("numpy", "load"), ("np", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system")}
)

GUARDS = (
    "server/auth.py",
    "server/origins.py",
    "server/body.py",
    "server/middleware.py",
    "server/unsupported.py",
    "server/convert.py",
    "server/prompts.py",
    "server/protocol",
    "server/chat/messages.py",
    "server/responses/request.py",
    "server/responses/items.py",
    "server/responses/store.py",
    "engine/params.py",
    "engine/text/template.py",
    "engine/text/tokenizer.py",
    "engine/model/loader.py",
    "engine/model/hub.py",
    "engine/model/resolve.py",
    "engine/model/gguf.py",
    "engine/model/gguf_header.py",
    "engine/model/cache.py",
)
"""What refuses what comes from outside."""


def sources(*names: str) -> Iterator[tuple[str, ast.Module]]:
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text("utf-8"))


def test_nothing_makes_code_of_bytes_or_text() -> None:
    found = []
    for name, module in sources(*PACKAGES):
        for node in ast.walk(module):
            match node:
                case ast.Import(names=names):
                    used = {alias.name.partition(".")[0] for alias in names} & RUNS_CODE
                case ast.ImportFrom(module=str(origin)):
                    used = {origin.partition(".")[0]} & RUNS_CODE
                case ast.Call(func=ast.Name(id=function)):
                    used = {function} & CALLS
                case ast.Call(func=ast.Attribute(value=ast.Name(id=origin), attr=function)):
                    used = {f"{origin}.{function}"} & {".".join(method) for method in METHODS}
                case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                    used = {"shell=True"}
                case _:
                    continue
            found += [f"{name}:{getattr(node, 'lineno', 0)} {each}" for each in used]
    assert found == []


def test_models_come_from_their_directory_without_their_code() -> None:
    checked = 0
    for name, module in sources("engine"):
        for node in ast.walk(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{name}:{node.lineno}"
            assert given.get("trust_remote_code") == "False", where
            assert given.get("local_files_only") == "True", where
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("name", GUARDS)
def test_no_check_is_left_out_by_python_o(name: str) -> None:
    for file, module in sources(name):
        asserts = [node.lineno for node in ast.walk(module) if isinstance(node, ast.Assert)]
        assert asserts == [], f"{file}: raise, for what comes from outside; asserts are for what cannot be"
