"""TensorRT-LLM's `speculative_config`: from keys and values to a `Speculation`, which says what
drafts, how much, and when.

Files, flags, requests and the Python API give the same block; where it came from is not known here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.compat.decoding import TYPE_KEY, Alias, DecodingConfig, config_class
from edgespec.compat.decoding_types import DECODING_TYPES, OWN_TYPE
from edgespec.errors import OptionError, RequestError
from edgespec.methods import METHODS
from edgespec.methods.block_variants import VARIANTS
from edgespec.runtime.drafters.loading import OwnOptions
from edgespec.runtime.drafters.options import fields_of, shown, types_of, unknown_key
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.opening.open_engine import SpecDecode, choose_draft, directory_of
from edgespec.runtime.opening.speculation import Speculation

AUTO = "AUTO"
ALSO_CALLED = {"speculative_model_dir": "speculative_model"}
# A key of several of TensorRT-LLM's types: a second drafter beside the first
SECOND_DRAFTER = "sa_config"
# Decoding types of TensorRT-LLM that draft from the text alone and that no row has
OF_THE_TEXT = ("lookahead", "sa")
# Others that no row has, and why
NOT_HERE = {
    "peagle": "it drafts all positions in one pass, and there is no such graph here",
    **{name.lower(): VARIANTS[f"a {name} draft"].why for name in ("DFlash2", "DFlare", "Domino")},
    "pard": "its draft fills a row of mask tokens in one pass, and there is no such graph here",
    "redrafter": "its draft is recurrent, and there is no such graph here",
    "explicitdrafttokens": "its draft is recurrent, and there is no such graph here",
    "externaldrafttokens": "drafts come from a drafter, and not with a request",
    "savestate": "it writes hidden states to train a draft, and drafts nothing",
}
# Keys of the block that belong to an engine, as they outlast a request
OF_ENGINES = ("speculative_model", "acceptance_window", "acceptance_length_threshold")

Block = DecodingConfig | Mapping[str, object] | None


OWN = config_class(OWN_TYPE, None, OwnOptions, needs_engine=False)


def config_classes() -> dict[str, type[DecodingConfig]]:
    """The class of each decoding type, by its name, in the order of DECODING_TYPES."""
    classes = {row.name: class_of_method(method) for method, row in DECODING_TYPES.items()}
    return classes | {OWN_TYPE.name: OWN}


def keys_as_written() -> dict[str, str]:
    """All keys of a block, as errors spell them for whoever wrote them in a file."""
    keys = {TYPE_KEY}.union(*map(fields_of, config_classes().values()))
    return {key: key for key in keys}


def class_of_method(method: str | None) -> type[DecodingConfig]:
    """The class of a method's decoding type; that of AUTO where it has none."""
    row = None if method is None else DECODING_TYPES.get(method)
    if method is None or row is None:
        return DecodingConfig
    needs_engine = METHODS[method].needs_engine
    return config_class(row, method, DRAFTERS[method].options, needs_engine)  # type: ignore[arg-type]


CLASS = "DecodingConfig"  # what names of classes end in


def config_names() -> list[str]:
    """The names of the classes of decoding types, such as AutoDecodingConfig."""
    return [*(kind.__name__ for kind in config_classes().values()), f"Auto{CLASS}"]


def class_named(name: str) -> type[DecodingConfig]:
    """The class of a decoding type by its own name, such as AutoDecodingConfig, or by an alias that
    sets no keys. Raises AttributeError where there is none, with the nearest."""
    message = f"module 'edgespec' has no attribute {name!r}"
    try:
        kind, alias = class_of(name.removesuffix(CLASS), "edgespec")
    except OptionError as error:
        why = error.what.partition(": ")[2]  # behind where it is
        raise AttributeError(f"{message}: {why}. {error.remedy}") from None
    if alias.presets:
        keys = ", ".join(f"{key}={value}" for key, value in alias.presets)
        raise AttributeError(f"{message}: write {kind.__name__}({keys})")
    return kind


def class_of(decoding_type: object, where: str) -> tuple[type[DecodingConfig], Alias]:
    """The class of a decoding type by its name or an alias, in any case and with or without
    underscores, and the alias. Raises OptionError for another one."""
    classes = config_classes()
    names = {plain(name): (kind, Alias(name)) for name, kind in classes.items()}
    names[plain(AUTO)] = DecodingConfig, Alias(AUTO)
    for row in DECODING_TYPES.values():
        for alias in row.aliases:
            names[plain(alias.name)] = classes[row.name], alias
    all_types = ", ".join([*classes, AUTO])
    if not isinstance(decoding_type, str):
        message = f"{where}: {TYPE_KEY} is {shown(decoding_type)}"
        raise OptionError(message, f"Write one of {all_types}.")
    wanted = plain(decoding_type)
    if wanted in names:
        return names[wanted]
    message = f"{where}: this version has no {TYPE_KEY} {decoding_type[:60]}"
    if wanted in OF_THE_TEXT:
        raise OptionError(message, f"From the text alone draft: {of_the_text()}.")
    if (why := NOT_HERE.get(wanted)) is not None:
        raise OptionError(f"{message}: {why}", f"Decoding types: {all_types}.")
    close = difflib.get_close_matches(wanted[:60], names, n=1)
    near = f"Did you mean {names[close[0]][0].decoding_type}? " if close else ""
    raise OptionError(message, f"{near}Decoding types: {all_types}.")


def of_the_text() -> str:
    """The decoding types that need no draft engine, for a sentence."""
    return ", ".join(name for name, kind in config_classes().items() if not kind.needs_engine)


def plain(name: str) -> str:
    """A name without its case, underscores and hyphens."""
    return name.lower().replace("_", "").replace("-", "")


def read_config(
    given: Block, where: str = "speculative_config", default: type[DecodingConfig] | None = None
) -> tuple[DecodingConfig | None, tuple[str, ...]]:
    """The config of a block, checked, and notes for its user; None where there is no block.

    Without a decoding_type it is of the class `default`. Raises OptionError that names the key,
    for an unknown one with the nearest known one.
    """
    if given is None:
        return None, ()
    if isinstance(given, DecodingConfig):
        return given, tuple(given.notes())
    if not isinstance(given, Mapping):
        raise OptionError(f"{where} is no mapping of keys to values", "Write keys and values.")
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = ALSO_CALLED.get(str(key), str(key))
        if name in values:
            raise OptionError(f"{where}: {name} is given twice", f"Leave {key} out.")
        values[name] = value
    if TYPE_KEY in values:
        kind, alias = class_of(values.pop(TYPE_KEY), where)
        values = dict(alias.presets) | values
    elif default is not None:
        kind, alias = default, Alias(default.decoding_type)
    else:
        message = f"{where}: {TYPE_KEY} is missing"
        raise OptionError(message, f"Add one of {', '.join([*config_classes(), AUTO])}.")
    if values.pop(SECOND_DRAFTER, None) is not None:
        message = f"{where}: {SECOND_DRAFTER} asks for a second drafter, and a request has one"
        raise OptionError(message, f"Remove it. From the text alone draft: {of_the_text()}.")
    known = fields_of(kind)
    if isinstance(values.get("drafter"), str) and "drafter" in known:
        message = f"{where}: the drafter {values['drafter'][:60]} is code, and a file runs none"
        raise OptionError(message, "Name it on the command line: `drafter` package.module:Class.")
    for name in values:
        if name not in known:
            raise foreign_key(name, kind, where)
    try:
        config = kind(**values)
    except OptionError as error:
        raise OptionError(f"{where}: {error.what}", error.remedy) from None
    return config, (*([alias.note] if alias.note else []), *config.notes())


def foreign_key(name: str, config_type: type[DecodingConfig], where: str) -> OptionError:
    """The error for a key that a decoding type does not have: it is another's, or unknown."""
    others = [other for other, kind in config_classes().items() if name in fields_of(kind)]
    if others:
        message = f"{where}: {name} is not a key of {TYPE_KEY} {config_type.decoding_type}"
        return OptionError(message, f"It is one of {', '.join(others)}. Remove it.")
    return unknown_key(name, [TYPE_KEY, *fields_of(config_type)], where)


# ---- beside an engine


def drafts_of(
    config: DecodingConfig, spec_decode: object, drafter: object, options: object
) -> object | None:
    """What drafts by a config: a method's name, a drafter, or None for the draft engine.

    `drafter` is one that was given beside it, for a type that takes one. Raises OptionError for
    what says again, or otherwise, what the config says.
    """
    takes_one = isinstance(config, OWN) and config.drafts_by is None
    if takes_one and drafter is None:
        message = f"decoding_type {config.decoding_type} was given without a drafter"
        raise OptionError(
            message, "Name it: `drafter` package.module:Class, or drafter= in Python."
        )
    given = {"spec_decode=False": spec_decode is False, "drafter_options": bool(options)}
    for name, is_given in (given | {"drafter": drafter is not None and not takes_one}).items():
        if is_given:
            message = f"{name} and speculative_config were both given"
            raise OptionError(message, "The config says what drafts: leave one of the two out.")
    return drafter if takes_one else config.drafts_by


def check_of_request(config: DecodingConfig) -> None:
    """Raises OptionError for keys that outlast a request, and where a drafter of the user's own is
    asked for and none is given."""
    if isinstance(config, OWN) and config.drafts_by is None:
        message = (
            f"decoding_type {config.decoding_type} needs a drafter, and a request runs no code"
        )
        remedy = (
            "Name the drafter for the whole run: `drafter` package.module:Class, or drafter= in"
            " Python. Requests without a decoding_type draft with it."
        )
        raise OptionError(message, remedy)
    for name in OF_ENGINES:
        if getattr(config, name):
            message = f"{name} is a matter of the engine, and not of one request"
            raise OptionError(message, "Give it where the engine is opened.")


def of_engine(config: DecodingConfig, method: str | None, where: str) -> DecodingConfig:
    """A config as the engine has it whose draft is of `method`: AUTO becomes that. Raises
    OptionError where it names another method than the draft's."""
    if config.method is None and config.needs_engine:
        values = {name: getattr(config, name) for name in fields_of(type(config))}
        return class_of_method(method)(**values)
    if config.method == method or not config.needs_engine:
        return config
    row = METHODS.get(method) if method is not None else None
    assert config.method is not None
    aliases = ", ".join(alias.name for alias in DECODING_TYPES[config.method].aliases)
    also = f" (or {aliases})" if aliases else ""
    message = f"decoding_type {config.decoding_type}{also} was given, and {where} has"
    if row is None or not row.needs_engine:
        remedy = "Build the draft into the same directory, or give it to run (speculative_model)."
        raise OptionError(f"{message} no draft", remedy)
    named = class_of_method(method).decoding_type
    raise OptionError(f"{message} {row.draft_title}", f"Write decoding_type: {named}.")


class AskedOfEngine(NamedTuple):
    """What a block asks of an engine: what drafts, None being the draft engine, how, and notes for
    its user."""

    drafter: object | None
    speculation: Speculation
    notes: tuple[str, ...]


def for_engine(
    given: Block, engine_dir: str | Path, spec_decode: SpecDecode, drafter: object, options: object
) -> AskedOfEngine | None:
    """What a block asks of the engine of a directory, beside the other arguments that say what
    drafts; None where there is no block. Raises OptionError, and what `choose_draft` does."""
    config, notes = read_config(given)
    if config is None:
        return None
    path, drafter = directory_of(engine_dir), drafts_of(config, spec_decode, drafter, options)
    choice = choose_draft(path, True, drafter)
    asked = of_engine(config, choice.method, str(path)).speculation
    return AskedOfEngine(drafter if choice.drafter is None else choice.drafter, asked, notes)


def for_request(config: DecodingConfig, method: str | None) -> Speculation:
    """What a config asks of a request to an engine that drafts by `method`. Raises OptionError for
    keys that are a matter of the engine, or a method that it does not have."""
    check_of_request(config)
    return of_engine(config, method, "this engine").speculation


def of_request(raw: object, where: str, method: str | None) -> DecodingConfig:
    """The config of a request's own block; without a decoding_type it is that of the `method` that
    the engine was opened with. Raises RequestError with its place."""
    try:
        if not isinstance(raw, Mapping):
            raise OptionError("is no object", 'Write {"decoding_type": ...}.')
        config, _ = read_config(raw, where, class_of_method(method))
        assert config is not None
        check_of_request(config)
    except OptionError as error:
        said = error.spelled(keys_as_written())
        message = said.what if said.what.startswith(where) else f"{where}: {said.what}"
        raise RequestError(message, said.remedy, said.param) from error
    return config


# ---- a JSON schema


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def schema() -> dict[str, Any]:
    """The JSON schema of the block, with one alternative a decoding type."""
    return {
        "description": "What drafts, how much and when, by the names of TensorRT-LLM.",
        "type": "object",
        "required": [TYPE_KEY],
        "oneOf": [*alternatives()],
    }


def alternatives() -> Iterator[dict[str, Any]]:
    """The schema of each decoding type."""
    classes = {**config_classes(), AUTO: DecodingConfig}
    aliases = {row.name: [a.name for a in row.aliases] for row in DECODING_TYPES.values()}
    for name, kind in classes.items():
        keys = {key: schema_of_key(kind, key) for key in fields_of(kind)}
        also = {a: keys[key] for a, key in ALSO_CALLED.items()}
        kinds = {"enum": [name, *aliases.get(name, [])], "description": "What drafts."}
        yield {
            "title": name,
            "type": "object",
            "properties": {TYPE_KEY: kinds, **keys, **also},
            "required": [TYPE_KEY],
            "additionalProperties": False,
        }


def schema_of_key(config_type: type[DecodingConfig], key: str) -> dict[str, Any]:
    """The schema of one key: its types, bounds, default and meaning."""
    field, kinds = fields_of(config_type)[key], types_of(config_type)[key]
    allowed = field.metadata
    out: dict[str, Any] = {"description": allowed["text"]}
    if allowed["schema"] is not None:
        out |= allowed["schema"]
    else:
        types = [JSON_TYPES[kind] for kind in kinds if kind in JSON_TYPES]
        out["type"] = types[0] if len(types) == 1 and type(None) not in kinds else [*types, "null"]
        if allowed["choices"]:
            out["enum"] = [*allowed["choices"], *([None] if type(None) in kinds else [])]
        for bound, word in (("low", "minimum"), ("high", "maximum")):
            if allowed[bound] is not None:
                out[word] = allowed[bound]
    if allowed.get("unused"):
        out["deprecated"] = True
        out["description"] += f" It means nothing here: {allowed['unused']}."
    if field.default is not None and isinstance(field.default, bool | int | float | str):
        out["default"] = field.default
    return out
