"""The types of arguments that name files and directories.

What is there is found out by the command, with an error that says more than that it is missing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    Text = click.ParamType[str]
else:
    Text = click.ParamType  # not generic in all versions

Parameter: TypeAlias = click.Parameter | None
Context: TypeAlias = click.Context | None


class JsonText(Text):
    """JSON, or the path of a file with it; the parsed value."""

    name = "JSON|FILE"

    def convert(self, value: Any, param: Parameter, ctx: Context) -> Any:
        """The value. Raises RequestError or click.BadParameter for what is neither."""
        from edgespec.errors import RequestError
        from edgespec.prompts.source import parse_json, read_bytes

        if not isinstance(value, str):
            return value
        text = refuse_empty(self, value, param, ctx)
        if text.lstrip().startswith("{"):
            assert param is not None
            return parse_json(text.encode(errors="surrogatepass"), param.opts[0])
        try:
            return parse_json(read_bytes(text), text)
        except RequestError as error:
            self.fail(f"{error.what} {error.remedy}", param, ctx)


class FilePath(click.Path):
    """The path of a file, of whatever name. An empty one would be the directory at hand."""

    def __init__(self, name: str = "path") -> None:
        super().__init__(readable=False, path_type=Path)
        self.name = name

    def convert(self, value: Any, param: Parameter, ctx: Context) -> Any:
        """Returns the path; click.BadParameter for an empty one."""
        return super().convert(self.checked(os.fsdecode(value), param, ctx), param, ctx)

    def checked(self, text: str, param: Parameter, ctx: Context) -> str:
        """The text of a path. Raises click.BadParameter."""
        return refuse_empty(self, text, param, ctx)


class DirectoryPath(FilePath):
    """The path of a directory with graphs, which ONNX and the engine libraries open by its name."""

    def checked(self, text: str, param: Parameter, ctx: Context) -> str:
        """The text of a path. Raises click.BadParameter, for one that is not UTF-8 too."""
        return refuse_other_encodings(self, super().checked(text, param, ctx), param, ctx)


class ExistingDirectory(FilePath):
    """The path of a directory that is there."""

    def convert(self, value: Any, param: Parameter, ctx: Context) -> Any:
        """Returns the path; click.BadParameter for what is no directory."""
        path = super().convert(value, param, ctx)
        if not os.path.isdir(path):  # noqa: PTH112 - False for a name that is too long, where Path raises
            self.fail(f"{path} is no directory", param, ctx)
        return path


class ExistingFile(FilePath):
    """The path of a regular file that is there."""

    def convert(self, value: Any, param: Parameter, ctx: Context) -> Any:
        """Returns the path; click.BadParameter for what is no regular file."""
        path = super().convert(value, param, ctx)
        if not os.path.isfile(path):  # noqa: PTH113 - False for a name that is too long, where Path raises
            self.fail(f"{path} is no file", param, ctx)
        return path


class ModelName(Text):
    """A checkpoint's directory, or its name on the hub."""

    name = "text"

    def convert(self, value: Any, param: Parameter, ctx: Context) -> str:
        """Returns the name; click.BadParameter for an empty one and one that is not UTF-8."""
        text = refuse_empty(self, os.fsdecode(value), param, ctx)
        return refuse_other_encodings(self, text, param, ctx)


def refuse_empty(kind: Any, text: str, param: Parameter, ctx: Context) -> str:
    """The text; click.BadParameter for an empty one and one with a null character."""
    if not text:
        kind.fail("it is empty: name a path ('.' is the current directory)", param, ctx)
    if "\0" in text:
        kind.fail("it has a null character, which no path may have", param, ctx)
    return text


def refuse_other_encodings(kind: Any, text: str, param: Parameter, ctx: Context) -> str:
    """The text; click.BadParameter where it is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(text).decode("utf-8", "backslashreplace")
        reason = "is not UTF-8, and libraries that read models open no file of such a name"
        kind.fail(f"{shown} {reason}: rename it, or make a link to it", param, ctx)
    return text


FILE, DIRECTORY, MODEL = FilePath("file"), DirectoryPath(), ModelName()
EXISTING_DIRECTORY, EXISTING_FILE = ExistingDirectory(), ExistingFile("file")
