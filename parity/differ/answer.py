"""The answer to "where do they part?": for a terminal, for JSON, for a page."""

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from parity.differ.values import Site, short

Stage = Literal["none", "parameters", "forward", "backward", "optimizer"]
_MOST = 4
"""Lines of one kind on a page; JSON has them all."""
_LARGEST = 1 << 14
"""Numbers that a factor may be the root of are smaller."""
_WHERE = {
    "none": "the same",
    "parameters": "they differ in their weights",
    "forward": "they part on the way forward",
    "backward": "forward they agree; they part on the way back",
    "optimizer": "forward and backward they agree; they part in the step of the optimizer",
}


@dataclass(frozen=True)
class Difference:
    """Where a function of JAX and a module of PyTorch part; false where they do not."""

    stage: Stage
    ours: Site | None = None
    theirs: Site | None = None
    agreed: tuple[tuple[Site, Site], ...] = ()
    """(ours, theirs) of the values before it that still agree."""
    kind: str | None = None
    """What kind of difference it is ("perhaps" where the numbers do not prove it), or what an experiment showed."""
    sure: bool = False
    """Whether the numbers or an experiment prove it, or both places read the same agreed values. Otherwise they are
    where to look first, and no more. Where it is not `confirmed`, the verdict is "likely"."""
    confirmed: bool = False
    """Whether, fed with what agrees, in one order, the two differ here: the difference is not inherited."""
    parameters: tuple[str, ...] = ()
    """What is wrong with weights, by name."""
    differing: tuple[str, ...] = ()
    """Outputs, gradients or weights that differ, with their relative errors."""
    opaque: tuple[str, ...] = ()
    """Operations that count as one value, although there is a program inside."""
    counts: tuple[int, int] = (0, 0)
    """Values of ours and of theirs that were compared."""
    name: str = "pair"
    sides: tuple[str, str] = ("JAX", "PyTorch")
    """What ours and theirs are called."""
    left_out: tuple[str, ...] = ()
    """Outputs that only one side has, or that are no arrays: they were not compared."""
    trained_alone: tuple[str, ...] = ()
    """Parameters that theirs does not train (`requires_grad` is False), and that have a gradient in ours."""
    unread: tuple[str, ...] = ()
    """Weights that theirs computes the outputs with, and ours does not."""
    narrow: tuple[Site, ...] = ()
    """Where a side computes in fewer digits than those of float64, whatever it is given: it was made to use float64."""
    rounded: tuple[str, ...] = ()
    """What differs, with relative errors, where these places keep their digits, if nothing else does."""

    ignored: tuple[str, ...] = ()
    """Places that were passed, as asked; and what was asked for and not met."""

    few_positions: tuple[str, ...] = ()
    """What a batch is too short to show."""

    others: tuple[Site, ...] = ()
    """Other lines of ours to look at, where it is not sure: where the order of what is read there may have been lost,
    what is chosen by and has no equal, where the two begin to differ as well, and what mends as much."""

    tried: bool = False
    """Whether it was found by trying out steps: where one is done otherwise, all agrees."""

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return self.stage != "none"

    def __str__(self) -> str:
        """A few lines, which fit a terminal where one is written to: the verdict, the places, what is known of them."""
        counts = f"{self.counts[0]} values in {self.sides[0]}, {self.counts[1]} in {self.sides[1]}"
        if not self:
            return f"{self.name}: {counts}: {self.heading}" + (f" ({'; '.join(self.notes)})" if self.notes else "")
        lines = [f"{self.name}: {self.heading}", f"  {self.verdict}"]
        for side, site in zip(self.sides, (self.ours, self.theirs), strict=True):
            if site is not None:
                where = f"{short(site.file)}:{site.line}  {site.source}" if site.file else site.source
                lines += [f"  {side:8} {where}", f"           {site.way}"]
            elif self.ours or self.theirs or not self.parameters:
                lines.append(f"  {side:8} no place: nothing there belongs to what the other side computes")
        lines += [f"  or:      {site}" for site in self.others]
        lines += [f"  what:    {self.kind}"] if self.kind else []
        lines += [f"  agrees:  {ours}  =  {theirs}" for ours, theirs in self.agreed[:3]]
        lines += [f"  {said}" for said in self.parameters[:8]]
        lines += [f"  differs: {said}" for said in self.differing[:4]]
        lines += [f"  ... and {len(self.differing) - 4} more"] if len(self.differing) > 4 else []
        lines += [f"  {line}" for line in self.notes]
        lines += [f"  not looked into: {', '.join(sorted(set(self.opaque)))}"] if self.opaque else []
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
        return "\n".join(folded(line, width) for line in [*lines, f"  {counts}"])

    @property
    def notes(self) -> list[str]:
        """What is no difference of what was compared, and has to be known beside it."""
        lines = dict.fromkeys(f"{short(site.file)}:{site.line}" for site in self.narrow if site.file)
        places, unread = (
            [*names][:_MOST] + [f"{len(names) - _MOST} more"] * (len(names) > _MOST) for names in (lines, self.unread)
        )
        said: dict[str, Sequence[str]] = {
            "ignored": self.ignored,
            "not compared": self.left_out,
            "trained in ours alone": self.trained_alone,
            "read in theirs alone": unread,
            "made to compute in float64": places,
            "differs as it is": self.rounded[:_MOST],
            "positions": () if self else self.few_positions,
        }
        return [f"{what}: {', '.join(names)}" for what, names in said.items() if names]

    @property
    def trust(self) -> list[str]:
        """The verdict on what was found, and the notes."""
        return [self.verdict, *self.notes] if self else self.notes

    @property
    def heading(self) -> str:
        """In which of the stages they part."""
        if self.stage == "parameters" and self.ours is not None:
            return "they read different weights, by their map"
        return _WHERE[self.stage]

    @property
    def verdict(self) -> str:
        """How much the answer can be trusted."""
        if not self:
            return "the same"
        if self.stage == "parameters" and self.sure:
            if self.ours is None:
                return "sure: the numbers themselves differ"
            return "sure: with what agrees, the two places read weights that are not each other's"
        if self.tried:
            return "not sure: with one step done otherwise here, all agrees; so may it with another"
        if self.sure and self.confirmed:
            return "sure: what both places read agrees, and what they make of it does not"
        if self.sure:
            return "likely: what both places read has the same numbers; their order, or what follows, is not all known"
        return "not sure: these are the places to look at first"

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON has them, and the verdict."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**fields, "verdict": self.verdict}

    def as_html(self) -> str:
        """A part of a page: HTML for `parity.report.page`, which has its style."""
        from jinja2 import Environment

        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_HTML)
        return page.render(found=self, short=short, most=_MOST).replace("\n", "")


def called(factor: float, sizes: Collection[int] = ()) -> str:
    """A number as an answer says it, and what it may be: a root, a quotient, a keep rate.

    `sizes` are those of the axes around: 8 may be the root of a width of 64, where there is such a width.
    """
    size, shown, sign = abs(factor), f"{factor:.6g}", "-" if factor < 0 else ""
    if not size or not math.isfinite(size):
        return shown
    large, inverse = max(size, 1 / size), "" if size > 1 else "1/"
    whole, square = round(min(large, _LARGEST)), round(min(large, _LARGEST) ** 2)
    if 1 < whole < _LARGEST and math.isclose(large, whole, rel_tol=1e-9) and whole**2 not in sizes:
        # A number that can be written out says as much as the quotient.
        return shown if math.isclose(float(shown), factor, rel_tol=1e-12) else f"{shown} ({sign}1/{whole})"
    if 1 < square < _LARGEST and math.isclose(large, math.sqrt(square), rel_tol=1e-9):
        if math.isqrt(square) ** 2 != square:
            return f"{shown} ({sign}{inverse}sqrt({square}))"
        if square in sizes:
            return f"{shown} ({sign}{inverse}sqrt({square})?)"
    for hundredth in range(1, 100) if factor > 0 else ():
        keep = 1 - hundredth / 100
        if math.isclose(size, 1 / keep, rel_tol=1e-9):
            return f"{factor:.6g} (1/{keep:g}: a dropout of {hundredth / 100:g} that is not off?)"
        if math.isclose(size, keep, rel_tol=1e-9):
            return f"{factor:.6g} (a dropout of {hundredth / 100:g}?)"
    return f"{factor:.9g}"


def folded(line: str, width: int) -> str:
    """A line of an answer, behind its label ("  PyTorch  port.py:11  return ...")."""
    label = re.match(r"(\s+(?:(?:JAX|PyTorch|[a-z]+:)\s+)?)(?=\S)", line)
    room = " " * len(label[1]) if label else "  "
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=room, break_long_words=False, break_on_hyphens=False))


def sendable(found: Difference | str) -> dict[str, Any]:
    """An answer, or why there is none, in plain types: as one process can send it to another."""
    if isinstance(found, str):
        return {"difference": None, "answer": found, "answer_html": None}
    return {"difference": found.as_json(), "answer": str(found), "answer_html": found.as_html()}


_HTML = """
{% macro listed(said) %}
{% for line in said[:most] %}{{ line }}{% if not loop.last %}<br>{% endif %}{% endfor %}
{% if said|length > most %}<br>... and {{ said|length - most }} more{% endif %}
{% endmacro %}
{% macro show(site) %}
<div>{% if site.file %}<code>{{ short(site.file) }}:{{ site.line }}</code> {% endif %}
<span class="note">{{ site.way }}</span>
{% if site.source %}<code class="source">{{ site.source }}</code>{% endif %}</div>
{% endmacro %}
<div class="answer"><p><b>{{ found.heading[0]|upper }}{{ found.heading[1:] }}</b> <span class="note">{{ found.name }}: \
{{ found.counts[0] }} values in {{ found.sides[0] }}, {{ found.counts[1] }} in {{ found.sides[1] }}</span></p><dl>
{% if found.parameters %}<dt>weights</dt><dd>{{ listed(found.parameters) }}</dd>{% endif %}
{% if found.differing %}<dt>differs</dt><dd>{{ listed(found.differing) }}</dd>{% endif %}
{% if found.ours %}<dt>{{ found.sides[0] }}</dt><dd>{{ show(found.ours) }}</dd>{% endif %}
{% if found.theirs %}<dt>{{ found.sides[1] }}</dt><dd>{{ show(found.theirs) }}</dd>{% endif %}
{% for site in found.others %}<dt>or</dt><dd>{{ show(site) }}</dd>{% endfor %}
{% if found.kind %}<dt>what</dt><dd>{{ found.kind }}</dd>{% endif %}
{% for pair in found.agreed[:most] %}<dt>agrees before</dt><dd>{{ show(pair[0]) }}{{ show(pair[1]) }}</dd>{% endfor %}
{% if found.opaque %}<dt>not looked into</dt><dd>{{ found.opaque|unique|sort|join(", ") }}</dd>{% endif %}
</dl>{% for line in found.trust %}<p class="note">{{ line }}</p>{% endfor %}</div>
"""
