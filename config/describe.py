"""The settings as a table, taken from `config.schema`: what help, README and the loader are made from."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal

from config import schema

ENV_PREFIX = "CHAIRLIFT_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a field of one of the sections of `schema.Settings`."""

    name: str
    """The field, and its key in a TOML file (which may have dashes for underscores)."""
    section: type
    hint: Any
    """The field's type."""
    default: Any
    doc: str
    rules: Mapping[str, Any]
    """The field's metadata; see `config.schema`."""

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """In the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def group(self) -> str:
        """Title of the section."""
        return section_title(self.section)[0]

    @property
    def secret(self) -> bool:
        """Whether the value must never be shown."""
        return bool(self.rules.get("secret"))

    @property
    def hidden(self) -> bool:
        """Whether help and README leave it out."""
        return bool(self.rules.get("hidden"))

    @property
    def base_hint(self) -> Any:
        """The type without `| None`."""
        if isinstance(self.hint, UnionType):
            [hint] = [part for part in typing.get_args(self.hint) if part is not type(None)]
            return hint
        return self.hint

    @property
    def kind(self) -> str:
        """The type in words, as help and README show it: `number`, `bytes`, `on or off`, `auto|float32|...`."""
        hint = self.base_hint
        if typing.get_origin(hint) is Literal:
            return "|".join(typing.get_args(hint))
        if self.rules.get("unit") == "bytes":
            return "bytes"
        return {int: "number", bool: "on or off", str: "text"}.get(hint, "texts")


@cache
def describe() -> tuple[Setting, ...]:
    """Every setting, in the order of the schema."""
    docs = _field_docs()
    return tuple(
        Setting(
            name=field.name,
            section=section,
            hint=hints[field.name],
            default=_default(field),
            doc=docs[section.__name__, field.name],
            rules=field.metadata,
        )
        for section in _sections(schema.Settings)
        for hints in [typing.get_type_hints(section)]
        for field in fields(section)
    )


def assemble(values: Mapping[str, Any]) -> schema.Settings:
    """The settings with `values` (by `Setting.name`) and, for the others, their defaults."""

    def build(class_: Any) -> Any:
        hints = typing.get_type_hints(class_)
        nested = {name: build(hint) for name, hint in hints.items() if is_dataclass(hint)}
        return class_(**nested, **{name: values[name] for name in hints.keys() & values.keys() - nested.keys()})

    settings: schema.Settings = build(schema.Settings)
    return settings


def section_title(section: type) -> tuple[str, str]:
    """Title and description of a section: its class's doc string is `title: description`."""
    title, _, description = (inspect.getdoc(section) or "").partition(": ")
    return title, description[:1].upper() + description[1:]


def _sections(class_: type) -> Iterator[type]:
    """The dataclasses below `class_` that hold settings, not further sections."""
    for hint in typing.get_type_hints(class_).values():
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _sections(hint) if any(map(is_dataclass, typing.get_type_hints(hint).values())) else [hint]


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _field_docs() -> dict[tuple[str, str], str]:
    """(class, field) -> the text under the field. Python keeps it in the source only."""
    docs = {}
    for class_ in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(class_, ast.ClassDef):
            continue
        for field, text in zip(class_.body, class_.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[class_.name, name] = inspect.cleandoc(doc)
    return docs
