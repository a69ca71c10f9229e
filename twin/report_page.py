"""Writes the folder of a report: the page, the numbers in it, the curves, and the pictures."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from jax_tformer.config.errors import InputError
from jax_tformer.files import require_writable, write_json
from parity.differ.answer import Difference
from parity.gates.measure import TRAJECTORY_FACTOR, TRAJECTORY_FLOOR
from parity.report.page import render
from twin.record import PARTED, Record
from twin.report import Findings
from twin.report_plots import draw
from twin.side_by_side import ALONE_STEPS

FILES = ("report.html", "report.json", "curves.csv", "loss.png", "difference.png", "parameters.png")
_TEMPLATE = """{% extends "page.html" %}
{% block body %}
{%- macro row(name, figures, field, form, unit=1) %}
<tr><td>{{ name }}</td>
{%- for side in sides %}
{%- set value = figures[side][field] if side in figures and field in figures[side] else none %}
<td>{{ form.format(value / unit) if value is not none else "" }}</td>
{%- endfor %}</tr>
{%- endmacro %}
{%- macro figure(svg, caption, wide=false) %}
<figure>
{%- if wide %}<div class="wide">{{ svg }}</div>{% else %}{{ svg }}{% endif -%}
<figcaption>{{ caption }}</figcaption></figure>
{%- endmacro -%}
<h1>{{ plan.name }}: JAX and PyTorch side by side</h1>
<p>The same {{ "{:,}".format(parameters) }} initial parameters, the same batches of
{{ training.batch_size }} sequences{% if training.accumulation > 1 %} in {{ training.accumulation }} parts{% endif %},
the same optimizer: {% if plan.seeds|length > 1 %}{{ plan.seeds|length }} seeds of {% endif -%}
{{ plan.steps }} steps in {{ plan.dtype -}}
{{ ", no dropout" if plan.dropout == "off" else ", and PyTorch gets the dropout masks that JAX draws" }}.</p>
{% for said in said %}
<p class="verdict"><b class="{{ {true: "green", false: "red"}.get(said.passed, "") }}">{{ said.mark }}</b>
{{- said.text }}</p>
{% endfor %}
{% if where is not none %}
<h2>Where they part</h2>
{{ where }}
{% endif %}
{% if seeds %}
<h2>Loss</h2>
<div class="figures">
{% set several = " Every seed has its lines." if seeds|length > 1 else "" %}
{{ figure(pictures.loss, "The loss of every training batch: PyTorch is the wide line, and JAX the narrow one on top."
   + several) }}
{{ figure(pictures.difference, "Points are steps, and lines the largest so far; steps without any difference have no "
   + "point." + allowance) }}
</div>
<div class="wide"><table>
<thead><tr><th>seed</th><th>steps</th><th>last loss, JAX</th><th>PyTorch</th><th>apart by</th>
{% if "transformers" in sides %}<th>transformers</th><th>from JAX by</th>{% endif %}
{% if truth %}<th>JAX from truth</th><th>PyTorch</th>{% endif %}
{% if judged %}<th>gate 6 judges</th><th>finds</th><th>allows</th>{% endif %}
</tr></thead>
<tbody>
{% for seed in seeds %}
<tr><td>{{ seed.seed }}</td><td>{{ seed.steps }}</td>
<td>{{ "%.6f"|format(seed.loss_jax) }}</td><td>{{ "%.6f"|format(seed.loss_torch) }}</td>
<td>{{ "%.1e"|format(seed.largest_difference) }}</td>
{% if "transformers" in sides %}
<td>{{ "%.6f"|format(seed.loss_transformers) }}</td>
<td>{{ "%.1e"|format(seed.largest_difference_transformers) }}</td>
{% endif %}
{% if truth %}
<td>{{ "%.1e"|format(seed.largest_distance_jax) }}</td>
<td>{{ "%.1e"|format(seed.largest_distance_torch) }}</td>
{% endif %}
{% if judged %}
{% set verdict = verdicts[loop.index0] %}
<td>{{ seed.judged_steps }} steps</td>
<td><span class="{{ "green" if verdict.passed else "red" }}">{{ "%.1e"|format(verdict.worst) }}</span></td>
<td>{{ "%.1e"|format(verdict.bar) }}</td>
{% endif %}
</tr>
{% endfor %}
{% if seeds|length > 1 %}
<tr><td>mean &plusmn; deviation</td><td></td>
{% for last in spread.values() %}
<td>{{ "%.4f"|format(last.mean) }} &plusmn; {{ "%.4f"|format(last.standard_deviation) }}</td>
{% endfor %}</tr>
{% endif %}
</tbody>
</table></div>
<p class="note">Losses, and the largest distance of any step, in nats a token.
{%- if truth %} The truth is the same training in float64, in PyTorch.{% endif %}</p>
<h2>Parameters</h2>
{% if "parameters" in pictures %}
{% set after %}
After step {{ seeds|map(attribute="parameters_step")|select|unique|sort|join(" or ") }}:
the larger of |a - b| / |b| in the Euclidean and in the maximum norm, of
each tensor; for several seeds the largest. A key bias that changes nothing in exact arithmetic is measured relative to
all parameters together.
{% if plan.dtype != "float64" %}
In {{ plan.dtype }} these differences are no error of either side: Adam divides by the size of the gradient, so a
gradient near zero, which is mostly rounding, still makes a step of full length.
{% endif %}
{% endset %}
{{ figure(pictures.parameters, after, wide=true) }}
<div class="wide"><table>
<thead><tr><th>the five that differ most</th><th>JAX from PyTorch</th>
{% if truth %}<th>JAX from truth</th><th>PyTorch from truth</th>{% endif %}</tr></thead>
<tbody>
{% for name in worst %}
<tr><td><code>{% for part in name.split(".") %}{{ part }}{% if not loop.last %}.<wbr>{% endif %}{% endfor %}</code></td>
{% for error in parameter_errors[name].values() if error is not none %}
<td>{{ "%.1e"|format(error) }}</td>
{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% else %}
<p>The run ended before its last step, so parameters were not compared.</p>
{% endif %}
<h2>Speed and memory</h2>
<div class="wide"><table>
<thead><tr><th></th>{% for name in sides.values() %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{{ row("ms a step, median", speed, "median_milliseconds", "{:.1f}") }}
<tr><td>ms a step, 10th to 90th percentile</td>
{% for side in sides if "median_milliseconds" in speed[side] %}
<td>{{ "%.1f"|format(speed[side].percentile_10_milliseconds) }} to
{{ "%.1f"|format(speed[side].percentile_90_milliseconds) }}</td>
{% endfor %}</tr>
{{ row("tokens/s", speed, "tokens_per_second", "{:,.0f}") }}
{{ row("first step, s, compilation included", speed, "first_step_seconds", "{:.1f}") }}
{% for name, field, unit, form in [
    ("ms a step, median", "step_seconds", 1e-3, "{:.1f}"),
    ("peak memory of the process, MB", "peak_memory", 1e6, "{:,.0f}"),
    ("of that before the model is built, MB", "memory_before", 1e6, "{:,.0f}"),
    ("peak memory of the device, MB", "device_memory", 1e6, "{:,.0f}"),
    ("one large matrix product, GFLOP/s", "product_rate", 1e9, "{:,.0f}"),
] if alone.values()|map(attribute=field, default=none)|select|list %}
{{ row("alone: " + name, alone, field, form, unit) }}
{% endfor %}
</tbody>
</table></div>
{% for side, found in alone.items() if "error" in found %}
<p class="note">{{ sides[side] }} alone was not measured: {{ found.error }}.</p>
{% endfor %}
{% if "transformers" in sides %}
<p class="note">transformers takes its step after the two others.</p>
{% endif %}
<p class="note">Both train in one process, a step each in turn, and the order changes with every step: JAX, PyTorch,
PyTorch, JAX. A step's time runs from a batch on the device to finished updated parameters (block_until_ready;
synchronize on a GPU). It does not include loading batches, drawing masks or this report. JAX may take a compiled
program from its cache on disk. Both sides compute float32 products in full float32: no TF32.</p>
{% if alone %}
<p class="note">Alone: {{ alone_steps }} steps in a process that imports only one framework, with the same weights,
batches and allocator settings. Its memory is the peak resident size: interpreter, libraries, compiler, parameters,
optimizer and activations. In the common process both share the allocator, so memory cannot be attributed to one
side.</p>
{% endif %}
{% if other_work is not none %}
<p class="note">Other work took {{ "{:.0%}".format(other_work) }} of the processors' time during the
comparison.</p>
{% endif %}
{% if plan.dropout == "shared" %}
<p class="note">With shared dropout, JAX's step draws masks but PyTorch's does not: compare the times alone.</p>
{% endif %}
{% if machine.vendor == "AuthenticAMD" and machine.device.startswith("cpu") %}
<p class="note">PyTorch's matrix products come from a library that is needlessly slow on AMD processors; compare the
rates of one large product before you conclude anything about the frameworks.</p>
{% endif %}
{% endif %}
<h2>Setup</h2>
<table class="facts"><tbody>
{% for name, value in [
    ("experiment", plan.name),
    ("seeds", plan.seeds|join(", ")),
    ("optimizer", optimizer),
    ("training", "the first %d steps of a schedule over %d"|format(plan.steps, training.steps)),
    ("torch.compile", "yes" if plan.torch_compile else "no"),
    ("device", machine.device),
    ("processor", processor),
    ("PyTorch threads", machine.torch_threads),
    ("system", machine.system),
] + machine.versions.items()|list %}
<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</tbody></table>
<p class="note">Every field of the experiment is in report.json, every step in curves.csv.</p>
{% endblock %}
"""


@dataclass(frozen=True)
class ReportFolder:
    """The folder of a report, which replaces an older one there."""

    path: Path

    def check(self) -> None:
        """Raises InputError if the folder is a file, holds anything but a report, or is not writable."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; expected a folder: choose another --out")
        require_writable(self.path)
        others = {path.name for path in self.path.iterdir()} - {*FILES} if self.path.is_dir() else ()
        if others:
            raise InputError(
                f"{self.path} holds {min(others)}, which is no part of a report; choose an empty or new --out"
            )

    def write(self, findings: Findings) -> None:
        """Writes all files; raises InputError if that fails."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # This report may lack a file of an older one: an interrupted run has no parameters.png.
            for name in FILES:
                (self.path / name).unlink(missing_ok=True)
            report, pictures = findings.as_dict(), draw(findings.record, self.path)
            write_curves(findings.record, self.path / "curves.csv")
            (self.path / "report.html").write_text(report_page(findings, report, pictures), encoding="utf-8")
            write_json(self.path / "report.json", report)
        except OSError as error:
            raise InputError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from error


def write_curves(record: Record, path: Path) -> None:
    """Writes one line for each seed and step, with all digits: the figures of every side."""
    sides = list(record.begun[0].figures)
    columns = [(figure, side) for figure in ("loss", "gradient_norm", "seconds") for side in sides]
    with open(path, "w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["seed", "step", "tokens", *(f"{figure}_{side}" for figure, side in columns)])
        for seed in record.begun:
            for step, ours in enumerate(seed.figures["jax"]):
                figures = [getattr(seed.figures[side][step], figure) for figure, side in columns]
                rows.writerow([seed.seed, step + 1, ours.tokens, *figures])


def report_page(findings: Findings, report: dict[str, Any], pictures: dict[str, str]) -> str:
    """Returns the page, as HTML: a `report` in words, `pictures` and tables, with nothing that is not in it."""
    record, where, errors = findings.record, findings.where, report["parameter_errors"]
    if where is not None:
        where = Markup(where.as_html()) if isinstance(where, Difference) else Markup("<p>{}</p>").format(where)
    allowance = (
        f" The area is what gate 6 allows JAX: up to {TRAJECTORY_FACTOR:g} times PyTorch's largest distance so far "
        f"from the float64 training, + {TRAJECTORY_FLOOR:.0e}, while PyTorch is within {PARTED:g} nats of it."
    )
    shown: dict[str, Any] = report | {
        "title": f"{findings.plan.name}: JAX and PyTorch",
        "said": findings.statements(),
        "where": where,
        "pictures": {name: Markup(svg) for name, svg in pictures.items()},
        "training": report["experiment"]["training"],
        "optimizer": ", ".join(f"{name} {value}" for name, value in report["experiment"]["optimizer"].items()),
        "processor": str(findings.machine),
        "sides": findings.sides,
        "truth": record.has("truth"),
        "judged": record.judged,
        "allowance": allowance if record.judged else "",
        "worst": sorted(errors, key=lambda name: -errors[name]["difference"])[:5],
        "alone_steps": ALONE_STEPS,
    }
    return render(_TEMPLATE, **shown)
