"""Data that comes with the program: dates as people write them, the commands of SCAN, and a few texts.

Dates are written in many languages, from Unicode's locale data (CLDR) in Babel, and read in ISO 8601:

    en_US: 3/4/21                   -> 2021-03-04
    en_GB: 04/03/2021               -> 2021-03-04
    ja: 2021年3月4日木曜日            -> 2021-03-04

The locale comes first because the text alone does not decide the date: 3/4/21 is in March or in April. All dates are
from 1969 to 2068, the years that two digits stand for (POSIX strptime's rule for %y).

SCAN has all commands of a small grammar, and what they have an agent do (Lake & Baroni, 2018, appendix A):

    turn left twice                 -> I_TURN_LEFT I_TURN_LEFT
    jump opposite left and walk     -> I_TURN_LEFT I_TURN_LEFT I_JUMP I_WALK
    run after look around right     -> I_TURN_RIGHT I_LOOK (4 times) I_RUN

There are 20,910. Three splits ask whether who has learnt some of them can do the others: by chance, all that take
more actions than those of training, and all that combine a verb known by itself alone (`SCAN_HELD_OUT`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from itertools import accumulate, compress, product, repeat

import numpy as np
from babel import Locale
from babel.dates import DateTimeFormat, parse_pattern, tokenize_pattern

from jax_tformer.config.errors import explained
from jax_tformer.data.order import held_out_items

FIRST_DAY = date(1969, 1, 1)
LAST_DAY = date(2068, 12, 31)
DAYS = (LAST_DAY - FIRST_DAY).days + 1
_ALL_DAYS = [FIRST_DAY + timedelta(index) for index in range(DAYS)]
_CODES = (
    "ar bg bn ca cs da de el en_CA en_GB en_US es et fa fi fr he hi hr hu hy id it ja ka ko lt lv ms nb nl pl pt ro ru"
    " sk sl sr_Cyrl sv sw ta th tr uk ur vi zh_Hans zh_Hant"
)
LOCALES = tuple(_CODES.split())
STYLES = ("short", "medium", "long", "full")
# Patterns with the weekday, in figures and in short words; CLDR names them by their fields.
SKELETONS = ("yMEd", "yMMMEd")

Unit = Callable[[date], int]
# Letter of a CLDR pattern -> the part of the date that it depends on. The era (G) is the same for all our dates.
_UNITS: dict[str, Unit] = {
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
    tables: tuple[tuple[Unit, tuple[str, ...]], ...]

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
        for pattern in dict.fromkeys(pattern.pattern for pattern in patterns):
            template = code + ": "
            tables = []
            for _, content in tokenize_pattern(pattern):
                if isinstance(content, str):
                    template += content.replace("%", "%%")
                else:
                    letter, width = content
                    unit = _UNITS[letter]
                    template += "%s"
                    tables.append((unit, _words_of(code, letter * width, unit)))
            formats.append(DateFormat(template, tuple(tables)))
    return tuple(formats)


@cache
def _words_of(code: str, field: str, unit: Unit) -> tuple[str, ...]:
    """Writes `field` for each value of its unit."""
    # All days of one year and one day of all years cover every value of every unit; no year is shorter than 365 days.
    examples = {unit(day): day for day in _ALL_DAYS[:365] + _ALL_DAYS[::365]}
    locale = Locale.parse(code)
    return tuple(str(DateTimeFormat(examples[value], locale)[field]) for value in sorted(examples))


@cache
def _days(fraction: float) -> dict[bool, tuple[date, ...]]:
    """Splits all days by whether they are held out."""
    chosen = held_out_items((day.isoformat() for day in _ALL_DAYS), fraction)
    return {side: tuple(compress(_ALL_DAYS, chosen == side)) for side in (False, True)}


def make_date_pair(rng: np.random.Generator, held_out: bool, fraction: float) -> tuple[str, str]:
    """Draws a (source, target) pair: a locale with a date in one of its formats, and the date in ISO 8601.

    The day alone decides whether it is among the `fraction` that is held out, so training pairs never show a held-out
    day. All formats are equally probable.
    """
    days = _days(fraction)[held_out]
    formats = date_formats()
    day, way = divmod(int(rng.integers(len(days) * len(formats))), len(formats))
    return formats[way].write(days[day]), days[day].isoformat()


def date_alphabet() -> str:
    """Returns every character that a source or a target can contain, sorted."""
    characters = set("0123456789-")
    for way in date_formats():
        characters.update(way.write(FIRST_DAY), *(word for _, words in way.tables for word in words))
    return "".join(sorted(characters))


def longest_dates() -> list[str]:
    """Returns for every format a text of its longest words, which no source of that format exceeds in characters."""
    return [way.template % tuple(max(words, key=len) for _, words in way.tables) for way in date_formats()]


_VERBS = ("walk", "look", "run", "jump")
_TIMES = {"": 1, " twice": 2, " thrice": 3}


def scan_commands() -> dict[str, tuple[str, ...]]:
    """Returns all commands with their actions."""
    verbs: dict[str, tuple[str, ...]] = {verb: (f"I_{verb.upper()}",) for verb in _VERBS}
    phrases = {**verbs}
    for (verb, does), side in product([*verbs.items(), ("turn", ())], ("left", "right")):
        turn = (f"I_TURN_{side.upper()}",)
        phrases[f"{verb} {side}"] = turn + does
        phrases[f"{verb} opposite {side}"] = 2 * turn + does
        phrases[f"{verb} around {side}"] = 4 * (turn + does)
    repeated = product(phrases.items(), _TIMES.items())
    sentences = {phrase + word: times * does for (phrase, does), (word, times) in repeated}
    for (first, does), (second, does_too) in product([*sentences.items()], repeat=2):
        sentences[f"{first} and {second}"] = does + does_too
        sentences[f"{first} after {second}"] = does_too + does
    return sentences


def scan_pairs(split: str) -> Iterator[tuple[str, str]]:
    """Yields all pairs of a command and its actions; in "scan-jump" one training pair in ten is the verb by itself."""
    made = {command: " ".join(actions) for command, actions in scan_commands().items()}
    yield from made.items()
    if split == "scan-jump":
        others = sum("jump" not in command.split() for command in made)
        yield from repeat(("jump", "I_JUMP"), others // 9 - 1)


SCAN_HELD_OUT: dict[str, Callable[[str, str], bool]] = {
    # The 3,920 that take more actions than those of training.
    "scan-length": lambda command, actions: len(actions.split()) > 22,
    # The 7,706 that have the verb with other words.
    "scan-jump": lambda command, actions: command != "jump" and "jump" in command.split(),
}
"""Which pairs of a split are held out; of others, a share by chance."""


PRIME = 97
LETTERS = "abcdefghijklmnop"
ODDS = (8 / 15, 4 / 15, 2 / 15, 1 / 15)
"""The probabilities of a chain's four next letters."""
_CHAIN = 2**20


def equations() -> str:
    """Lists addition modulo a prime, all of it, a line each: "90 + 9 = 2" (Power et al., 2022)."""
    return "\n".join(f"{a} + {b} = {(a + b) % PRIME}" for a in range(PRIME) for b in range(PRIME))


def python_docs() -> Iterable[str]:
    """Returns the topics of the language reference that ships inside CPython."""
    with explained("this Python comes without pydoc_data; install all of its standard library", ImportError):
        from pydoc_data import topics
    # Some texts are there under two names.
    return dict.fromkeys(topics.topics[name] for name in sorted(topics.topics))


def markov_chain() -> str:
    """Draws a Markov chain of letters: letter 3 x + k modulo 16 follows letter x with the k-th of the odds.

    All letters are as frequent in the long run.
    """
    drawn = np.searchsorted(np.cumsum(ODDS[:-1]), np.random.default_rng(0).random(_CHAIN), side="right")
    return "".join(LETTERS[x] for x in accumulate(drawn.tolist(), lambda x, k: (3 * x + k) % len(LETTERS)))


TEXTS: dict[str, Callable[[], Iterable[str]]] = {
    "python-docs": python_docs,
    "modular-addition": lambda: [equations()],
    "markov-chain": lambda: [markov_chain()],
}
"""Source of text -> its documents."""
