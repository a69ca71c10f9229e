"""The dates: as Babel writes them, one meaning for each text, the same pairs from the same seed."""

from datetime import date, timedelta

import numpy as np
import pytest
from babel import Locale
from babel.dates import format_date, format_skeleton

from jax_tformer.data import generated

ALL_DAYS = [generated.FIRST_DAY + timedelta(index) for index in range(generated.DAYS)]


@pytest.mark.parametrize("code", generated.LOCALES)
def test_every_locale_writes_what_babel_writes(code):
    ways = [way for way in generated.date_formats() if way.template.startswith(f"{code}: ")]
    assert len(ways) >= 3
    skeletons = [name for name in generated.SKELETONS if name in Locale.parse(code).datetime_skeletons]
    # Every month, weekday and day of the month; and days of all decades.
    for day in ALL_DAYS[:365] + ALL_DAYS[::1147]:
        expected = {format_date(day, style, code) for style in generated.STYLES}
        expected |= {format_skeleton(name, day, locale=code) for name in skeletons}
        assert {way.write(day) for way in ways} == {f"{code}: {text}" for text in expected}


def test_every_text_means_one_date():
    meanings = {}
    for way in generated.date_formats():
        # All days of three years that differ in one digit, and one day in each of the other years.
        for day in ALL_DAYS[: 3 * 366] + ALL_DAYS[::347]:
            assert meanings.setdefault(way.write(day), day) == day, way.write(day)
    assert len(meanings) > 250_000


def draw(count, held_out=False):
    generator = np.random.default_rng(1)
    return [generated.make_date_pair(generator, held_out, 0.1) for _ in range(count)]


def test_held_out_days_are_never_trained_on():
    held_out, trained = ({day for _, day in draw(20_000, side)} for side in (True, False))
    assert not held_out & trained
    assert 0.09 * generated.DAYS < len(held_out) <= round(0.1 * generated.DAYS)
    # Fixed for ever, on every machine.
    assert min(held_out) == "1969-01-21"
    assert {day[:4] for day in held_out} == {str(year) for year in range(1969, 2069)}


def test_a_pair_is_a_way_of_writing_its_date():
    pairs = draw(2_000)
    for source, target in pairs:
        assert source in {way.write(date.fromisoformat(target)) for way in generated.date_formats()}
    assert {source.split(":")[0] for source, _ in pairs} == set(generated.LOCALES)
