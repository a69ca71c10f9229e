"""Pairs of a date as people write it in many languages and in ISO 8601, from Unicode's locale data (CLDR) in Babel.

    en_US: 3/4/21              -> 2021-03-04
    en_GB: 04/03/2021          -> 2021-03-04
    ja: 2021年3月4日木曜日       -> 2021-03-04

The locale comes first because the text alone does not decide the date: 3/4/21 is in March or in April. All dates are
from 1969 to 2068, the years that two digits stand for (POSIX strptime's rule for %y).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from itertools import compress

import numpy as np
from babel import Locale
from babel.dates import DateTimeFormat, DateTimePattern, parse_pattern, tokenize_pattern

from jax_tformer.data.sources import held_out_items

FIRST_DAY = date(1969, 1, 1)
LAST_DAY = date(2068, 12, 31)
DAYS = (LAST_DAY - FIRST_DAY).days + 1
_ALL = [FIRST_DAY + timedelta(index) for index in range(DAYS)]
_CODES = (
    "ar bg bn ca cs da de el en_CA en_GB en_US es et fa fi fr he hi hr hu hy id it ja ka ko lt lv ms nb nl pl pt ro ru"
    " sk sl sr_Cyrl sv sw ta th tr uk ur vi zh_Hans zh_Hant"
)
LOCALES = tuple(_CODES.split())
STYLES = ("short", "medium", "long", "full")
# Patterns with the weekday, in figures and in short words; CLDR names them by their fields.
SKELETONS = ("yMEd", "yMMMEd")

# Letter of a CLDR pattern -> the part of the date that it depends on. The era (G) is the same for all our dates.
_UNITS: dict[str, Callable[[date], int]] = {
    "y": lambda day: day.year - FIRST_DAY.year,
    "M": lambda day: day.month - 1,
    "L": lambda day: day.month - 1,
    "d": lambda day: day.day - 1,
    "E": date.weekday,
    "c": date.weekday,
    "G": lambda day: 0,
}


@dataclass(frozen=True)
class DateFormat:
    """One way to write dates: a template with a gap for each field, and the words for each gap."""

    template: str
    tables: tuple[tuple[Callable[[date], int], tuple[str, ...]], ...]

    def write(self, day: date) -> str:
        """Writes the locale and `day`, like babel.dates.format_date but many times faster."""
        return self.template % tuple(words[unit(day)] for unit, words in self.tables)


@cache
def date_formats() -> tuple[DateFormat, ...]:
    """Lists all ways to write a date: each distinct pattern of each locale."""
    formats = []
    for code in LOCALES:
        locale = Locale.parse(code)
        patterns = [locale.date_formats[style] for style in STYLES]
        patterns += [
            parse_pattern(locale.datetime_skeletons[name]) for name in SKELETONS if name in locale.datetime_skeletons
        ]
        formats += [_compile(code, pattern) for pattern in {pattern.pattern: pattern for pattern in patterns}.values()]
    return tuple(formats)


def _compile(code: str, pattern: DateTimePattern) -> DateFormat:
    template = code + ": "
    tables = []
    for _, content in tokenize_pattern(pattern.pattern):
        if isinstance(content, str):
            template += content.replace("%", "%%")
        else:
            letter, width = content
            unit = _UNITS[letter]
            template += "%s"
            tables.append((unit, _words(code, letter * width, unit)))
    return DateFormat(template, tuple(tables))


@cache
def _words(code: str, field: str, unit: Callable[[date], int]) -> tuple[str, ...]:
    """Writes `field` for each value of its unit."""
    # All days of one year and one day of all years cover every value of every unit.
    some = [*_ALL[:365], *(date(year, 1, 1) for year in range(FIRST_DAY.year, LAST_DAY.year + 1))]
    examples = {unit(day): day for day in some}
    locale = Locale.parse(code)
    return tuple(str(DateTimeFormat(examples[value], locale)[field]) for value in sorted(examples))


@cache
def _days(fraction: float) -> dict[bool, tuple[date, ...]]:
    """Splits all days by whether they are held out."""
    chosen = held_out_items((day.isoformat() for day in _ALL), fraction)
    return {side: tuple(compress(_ALL, chosen == side)) for side in (False, True)}


def make_pair(rng: np.random.Generator, held_out: bool, fraction: float) -> tuple[str, str]:
    """Draws a (source, target) pair: a locale with a date in one of its formats, and the date in ISO 8601.

    The day alone decides whether it is among the `fraction` that is held out, so training pairs never show a held-out
    day. All formats are equally probable.
    """
    days, formats = _days(fraction)[held_out], date_formats()
    day, way = divmod(int(rng.integers(len(days) * len(formats))), len(formats))
    return formats[way].write(days[day]), days[day].isoformat()


def alphabet() -> str:
    """Returns every character that a source or a target can contain, sorted."""
    characters = set("0123456789-")
    for way in date_formats():
        characters.update(way.write(FIRST_DAY), *(word for _, words in way.tables for word in words))
    return "".join(sorted(characters))


def longest_sources() -> list[str]:
    """Returns for every format a text of its longest words, which no source of that format exceeds in characters."""
    return [way.template % tuple(max(words, key=len) for _, words in way.tables) for way in date_formats()]


def description() -> str:
    """Describes all that decides the pairs, because another release of Babel may write dates differently."""
    return repr([(way.template, [words for _, words in way.tables]) for way in date_formats()])
