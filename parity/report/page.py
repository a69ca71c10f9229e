"""The skeleton of a report page: one file that loads nothing, readable on a phone, in light and in dark.

A page is a Jinja template that extends "page.html" and fills its block `body`; whatever it shows is escaped, unless it
is `Markup`. `{% from "table.html" import table %}` gives it tables that scroll sideways by themselves.
"""

from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --line: #d9d9de; --soft: #f4f4f6; --good: #14743c; --bad: #b3261e; --text: #1d1d21;
        --jax: #0a5fa5; --torch: #e08214; --band: #dfe9f2; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3a40; --soft: #26262b; --good: #6fd398; --bad: #ff8a80; --text: #e8e8ec;
          --jax: #7cc0f5; --torch: #f2a24b; --band: #24384a; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem;
       color: var(--text); }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 44rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { background: var(--soft); }
.green { color: var(--good); } .red { color: var(--bad); font-weight: 600; }
.verdict { font-size: 1.05rem; }
figure { margin: 1rem 0; } svg, img { max-width: 100%; height: auto; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.figures svg { width: 100%; } .wide svg { max-width: none; }
.facts td { text-align: left; white-space: normal; }
@media (max-width: 36rem) {
  th, td { padding: .3rem .45rem; } th:first-child, td:first-child { white-space: normal; }
}
.answer { border-left: 3px solid var(--line); padding: .1rem 0 .1rem .9rem; margin: .6rem 0 1rem; max-width: 60rem; }
.answer p { margin: .2rem 0; } .answer dl { margin: .3rem 0; display: grid; grid-template-columns: max-content 1fr;
          gap: .25rem .9rem; } .answer dt { font-size: .85rem; opacity: .8; } .answer dd { margin: 0; }
.answer .source { display: block; white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft);
                  padding: .15rem .45rem; border-radius: .25rem; margin: .1rem 0 .3rem; }
@media (max-width: 36rem) { .answer dl { grid-template-columns: 1fr; gap: 0; } .answer dd { margin-bottom: .4rem; } }
figcaption, .note { font-size: .85rem; opacity: .8; }
code { font: .85em ui-monospace, monospace; }
{% block style %}{% endblock %}
</style>
</head>
<body>
{% block body %}{% endblock %}
</body>
</html>
"""
_TABLE = """
{% macro table(header, rows) %}
<div class="wide"><table>
<thead><tr>{% for cell in header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
"""
_ENVIRONMENT = Environment(
    loader=DictLoader({"page.html": _PAGE, "table.html": _TABLE}),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **names: Any) -> str:
    """What a Jinja template says of `names`."""
    return _ENVIRONMENT.from_string(template).render(names)
