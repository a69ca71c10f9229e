"""The answer to "where do they part?" as a part of a page: both lines, what agrees before them, how sure that is."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from parity.differ.values import Site, short

if TYPE_CHECKING:
    from parity.differ.answer import Difference

_MOST = 4
"""Lines of one kind; JSON has them all."""


def answer_html(found: "Difference") -> str:
    """HTML for `parity.report.page`, which has its style."""
    counted = f"{found.counts[0]} values in JAX, {found.counts[1]} in PyTorch"
    where = found.heading[:1].upper() + found.heading[1:]
    heading = f'<p><b>{escape(where)}</b> <span class="note">{escape(found.name)}: {counted}</span></p>'
    rows = "".join(f"<dt>{label}</dt><dd>{said}</dd>" for label, said in _rows(found))
    said = [found.verdict, *found.notes] if found else found.notes
    trust = "".join(f'<p class="note">{escape(line)}</p>' for line in said)
    return f'<div class="answer">{heading}<dl>{rows}</dl>{trust}</div>'


def _rows(found: "Difference") -> Iterator[tuple[str, str]]:
    if found.parameters:
        yield "weights", _listed(found.parameters)
    if found.differing:
        yield "differs", _listed(found.differing)
    for label, site in (("JAX", found.ours), ("PyTorch", found.theirs)):
        if site is not None:
            yield label, _site(site)
    if found.kind:
        yield "what", escape(found.kind)
    for ours, theirs in found.agreed[:_MOST]:
        yield "agrees before", f"{_site(ours)}{_site(theirs)}"
    if found.opaque:
        yield "not looked into", escape(", ".join(sorted(set(found.opaque))))


def _listed(said: tuple[str, ...]) -> str:
    more = [f"... and {len(said) - _MOST} more"] if len(said) > _MOST else []
    return "<br>".join(map(escape, [*said[:_MOST], *more]))


def _site(site: Site) -> str:
    """File, line and operation, and below them the line itself."""
    where = f"<code>{escape(f'{short(site.file)}:{site.line}')}</code> " if site.file else ""
    source = f'<code class="source">{escape(site.source)}</code>' if site.source else ""
    return f'<div>{where}<span class="note">{escape(site.about)}</span>{source}</div>'
