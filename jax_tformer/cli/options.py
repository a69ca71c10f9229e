"""Parses command lines with tyro."""

import contextlib
import difflib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from jax_tformer.config.errors import InputError
from jax_tformer.terminal import as_called

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C")


def parse(
    kind: Callable[..., C],
    arguments: Sequence[str],
    *,
    prog: str,
    description: str,
    default: Any = None,
    short_names: Mapping[str, str] = {},
) -> C:
    """Parses `arguments` into a `kind` (a dataclass); raises InputError, in one line, for what does not fit.

    `short_names` maps short flags to full ones. Whole numbers may also be written like 1e3.
    """
    import tyro  # imported here, so that programs start fast

    told, prog, description = io.StringIO(), as_called(prog), as_called(description)
    extra = {} if default is None else {"default": default}
    if short_names:
        fields = {short: "FIELD" if short.endswith(".") else "" for short in short_names}
        meanings = ", ".join(f"{short}{fields[short]} for {name}{fields[short]}" for short, name in short_names.items())
        description = f"{description}\n\nShort names: {meanings}."
    try:
        with contextlib.redirect_stderr(told):
            found: C = tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=[long_name(argument, short_names) for argument in arguments],
                config=(tyro.conf.AvoidSubcommands,),
                registry=_ways_to_write(),
                **extra,
            )
            return found
    except SystemExit as error:
        if not error.code:
            raise
        raise InputError(f"{_one_line(told.getvalue(), list(short_names))}; see {prog} --help") from None


def parse_checkpoint(asked: str) -> int | Literal["best"] | None:
    """Parses the value of --checkpoint for `load_trained`; raises InputError if it is not valid."""
    if asked not in ("newest", "best") and re.fullmatch("[0-9]{1,18}", asked) is None:
        raise InputError(f"--checkpoint is {asked!r}; expected newest, best, or the number of a step")
    if asked == "best":
        return "best"
    return None if asked == "newest" else int(asked)


def long_name(argument: str, short_names: Mapping[str, str]) -> str:
    """Replaces a short flag in `argument` by the full one."""
    flag, equals, value = argument.partition("=")
    name = flag.replace("_", "-")
    for short, full in short_names.items():
        # A short name that ends in a dot stands for the beginnings of flags.
        if name == short or (short.endswith(".") and name.startswith(short)):
            return full + name[len(short) :] + equals + value
    return argument


def given_flags(arguments: Sequence[str], short_names: Mapping[str, str] = {}) -> dict[str, str]:
    """Returns the flags among `arguments`, each by its full name and with hyphens, and what stands behind each."""
    flags = {}
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument.startswith("--"):
            flag, equals, value = long_name(argument, short_names).partition("=")
            flags[flag.replace("_", "-")] = value if equals else following
    return flags


def _ways_to_write() -> "ConstructorRegistry":
    """Makes tyro read fields of type int, or int or None, as whole numbers, also like 1e3, and lists like a,b,c."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
        if field.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: _whole_number(texts[0]),
            is_instance=lambda value: type(value) is int,
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def list_rule(field: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[str, ...]] | None:
        if get_origin(field.type) is not tuple or get_origin(item := get_args(field.type)[0]) is not Literal:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{{{'|'.join(get_args(item))}}},...",
            instance_from_str=lambda texts: tuple(name.strip() for name in texts[0].split(",")),
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: [",".join(value)],
        )

    return registry


def _whole_number(text: str) -> int:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a whole number") from None
    # The bound avoids writing out 1e999999999.
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def _one_line(message: str, short_names: Sequence[str] = ()) -> str:
    """Takes the sentence out of the box that tyro draws around an error, and adds similar names, tyro's or ours."""
    # On terminals without these characters, tyro prints lines of hyphens.
    lines = [line.strip("│╭╮╰╯─ ") for line in message.splitlines()]
    lines = ["" if set(line) <= {"-"} else line for line in lines]
    text = " ".join(takewhile(bool, dropwhile(lambda line: not line, lines[1:])))
    text = re.sub(r"Error parsing (__tyro-dummy-inner__\.?|TrainOptions: )?", "", text).removeprefix(": ").rstrip(".")
    text = re.sub(r"^Missing from [^:]*: (\S+) (.*)\. \(required\)$", r"\1 is missing: \2", text)
    text = re.sub(r"^Missing value for argument '(.*)'\. Expected 1 values$", r"\1 has no value", text)
    text = re.sub(
        r": no type matching \{None\}\|(\S+) could be .* from \['(.*)'\]$", r" is '\2'; expected None or \1", text
    )
    if choices := re.search(r"\. Expected one of \((.*)\)$", text):
        # tyro's order changes from one process to the next.
        named = sorted(name.strip(" '") for name in choices[1].rstrip(",").split(","))
        text = f"{text[: choices.start()]}; expected one of {', '.join(named)}"
    suggested = list[str]()
    if text.startswith("Unrecognized"):
        suggested += difflib.get_close_matches(text.split()[2].partition("=")[0].rstrip(","), short_names, 1, 0.75)
    if "Perhaps you meant:" in lines:
        suggested += [line.split()[0] for line in lines[lines.index("Perhaps you meant:") :] if line.startswith("--")]
    if suggested:
        text += f"; perhaps you meant {' or '.join(suggested)}"
    kept = re.match(r"--|[A-Z]+ is missing", text)
    return text if kept else text[:1].lower() + text[1:]
