"""Makes report.html, a single page that loads nothing else."""

from collections.abc import Iterable, Mapping
from html import escape

from parity.differ.answer import Difference
from parity.gates.measure import TRAJECTORY_FACTOR, TRAJECTORY_FLOOR
from parity.report.page import page, table
from twin.record import PARTED, Record, gate6
from twin.report import SIDES, Findings, shown_sides, speed_figures, spread
from twin.report_plots import difference_figure, loss_figure, parameter_figure, to_svg
from twin.side_by_side import ALONE_STEPS, Needs


def report_page(findings: Findings) -> str:
    """Returns the page, as HTML."""
    plan, record = findings.plan, findings.record
    parts = [f"<h1>{escape(plan.name)}: JAX and PyTorch side by side</h1>", f"<p>{_setting(findings)}</p>"]
    for statement in findings.statements():
        colour = {True: "green", False: "red", None: ""}[statement.passed]
        parts.append(f'<p class="verdict"><b class="{colour}">{statement.mark}</b>{escape(statement.text)}</p>')
    if findings.where is not None:
        where = findings.where
        said = where.as_html() if isinstance(where, Difference) else f"<p>{escape(where)}</p>"
        parts.append(f"<h2>Where they part</h2>\n{said}")
    if record.begun:
        parts += [_curves(record), _seeds(record), _parameters(record), _speed(findings)]
    parts.append(_setup(findings))
    return page(f"{plan.name}: JAX and PyTorch", "\n".join(parts))


def _setting(findings: Findings) -> str:
    plan, training = findings.plan, findings.plan.experiment.training
    seeds = f"{len(plan.seeds)} seeds of " if len(plan.seeds) > 1 else ""
    dropout = ", no dropout" if plan.dropout == "off" else ", and PyTorch gets the dropout masks that JAX draws"
    parts = f" in {training.accumulation} parts" if training.accumulation > 1 else ""
    return escape(
        f"The same {findings.parameters:,} initial parameters, the same batches of {training.batch_size} "
        f"sequences{parts}, the same optimizer: {seeds}{plan.steps} steps in {plan.dtype}{dropout}."
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _curves(record: Record) -> str:
    several = " Lines are means; areas reach from the lowest to the highest seed." if len(record.begun) > 1 else ""
    apart = "Points are steps, and lines the largest so far; steps without any difference have no point."
    if record.dtype == "float32" and record.has_truth:
        apart += (
            f" The area is what gate 6 allows JAX: up to {TRAJECTORY_FACTOR:g} times PyTorch's largest distance so far "
            f"from the float64 training, + {TRAJECTORY_FLOOR:.0e}, while PyTorch is within {PARTED:g} nats of it."
        )
    figures = [
        _figure(
            to_svg(loss_figure(record), "loss", "Loss of JAX and PyTorch over steps"),
            "The loss of every training batch: PyTorch is the wide line, and JAX the narrow one on top." + several,
        ),
        _figure(to_svg(difference_figure(record), "difference", "Difference of the losses over steps"), apart),
    ]
    return f'<h2>Loss</h2>\n<div class="figures">{"".join(figures)}</div>'


def _seeds(record: Record) -> str:
    header = ["seed", "steps", "last loss, JAX", "PyTorch", "apart by"]
    header += ["transformers", "from JAX by"] if record.has_transformers else []
    judged = record.dtype == "float32" and record.has_truth
    header += ["JAX from truth", "PyTorch"] if record.has_truth else []
    header += ["gate 6 judges", "finds", "allows"] if judged else []
    rows = []
    for seed in record.begun:
        row = [str(seed.seed), str(seed.steps), f"{seed.jax[-1].loss:.6f}", f"{seed.torch[-1].loss:.6f}"]
        row.append(f"{seed.distance('jax', 'torch').max():.1e}")
        if record.has_transformers:
            row += [f"{seed.transformers[-1].loss:.6f}", f"{seed.distance('jax', 'transformers').max():.1e}"]
        if record.has_truth:
            row += [f"{seed.distance(side, 'truth').max():.1e}" for side in SIDES]
        if judged:
            verdict = gate6(seed)
            colour = "green" if verdict.passed else "red"
            row += [
                f"{seed.judged()} steps",
                f'<span class="{colour}">{verdict.worst:.1e}</span>',
                f"{verdict.bar:.1e}",
            ]
        rows.append(row)
    last = spread(record)
    if len(record.begun) > 1:
        figures = [f"{x['mean']:.4f} &plusmn; {x['standard_deviation']:.4f}" for x in last.values()]
        rows.append(["mean &plusmn; deviation", "", *figures, *[""] * (len(header) - 4)])
    note = "Losses, and the largest distance of any step, in nats a token."
    note += " The truth is the same training in float64, in PyTorch." if record.has_truth else ""
    return f'{table(header, rows)}\n<p class="note">{note}</p>'


def _parameters(record: Record) -> str:
    errors = record.parameters()
    if not errors:
        return "<h2>Parameters</h2>\n<p>The run ended before its last step, so parameters were not compared.</p>"
    svg = to_svg(parameter_figure(errors), "parameters", "Relative difference of every parameter by layer")
    worst = sorted(errors, key=lambda name: -errors[name].difference)[:5]
    header = ["the five that differ most", "JAX from PyTorch"]
    header += ["JAX from truth", "PyTorch from truth"] if record.has_truth else []
    rows = [
        [
            f"<code>{escape(name).replace('.', '.<wbr>')}</code>",
            *(f"{error:.1e}" for error in errors[name] if error is not None),
        ]
        for name in worst
    ]
    after = sorted({seed.parameters_step for seed in record.seeds if seed.parameters})
    caption = (
        f"After step {' or '.join(map(str, after))}: the larger of |a - b| / |b| in the Euclidean and in the maximum "
        "norm, of each tensor; for several seeds the largest. A key bias that changes nothing in exact arithmetic is "
        "measured relative to all parameters together."
    )
    if record.dtype != "float64":
        caption += (
            f" In {record.dtype} these differences are no error of either side: Adam divides by the size of the "
            "gradient, so a gradient near zero, which is mostly rounding, still makes a step of full length."
        )
    return (
        f'<h2>Parameters</h2>\n<figure><div class="wide">{svg}</div><figcaption>{caption}</figcaption></figure>\n'
        f"{table(header, rows)}"
    )


_ALONE = (
    ("ms a step, median", "step_seconds", 1e-3, "{:.1f}"),
    ("peak memory of the process, MB", "peak_memory", 1e6, "{:,.0f}"),
    ("of that before the model is built, MB", "memory_before", 1e6, "{:,.0f}"),
    ("peak memory of the device, MB", "device_memory", 1e6, "{:,.0f}"),
    ("one large matrix product, GFLOP/s", "product_rate", 1e9, "{:,.0f}"),
)
"""Rows for each framework alone: name, field of `Needs`, unit, format."""


def _speed(findings: Findings) -> str:
    record, alone = findings.record, findings.alone
    sides = shown_sides(record)
    figures = {side: speed_figures(record, side) for side in sides}
    spread_of = {
        side: [f"{figures[side][f'percentile_{p}_milliseconds']:.1f}" for p in (10, 90)]
        if "median_milliseconds" in figures[side]
        else ["", ""]
        for side in sides
    }
    rows = [
        ["ms a step, median", *_cells(figures, "median_milliseconds", "{:.1f}", sides)],
        ["ms a step, 10th to 90th percentile", *(" to ".join(spread_of[side]) for side in sides)],
        ["tokens/s", *_cells(figures, "tokens_per_second", "{:,.0f}", sides)],
        ["first step, s, compilation included", *_cells(figures, "first_step_seconds", "{:.1f}", sides)],
    ]
    both = {side: vars(x) for side, x in alone.items() if isinstance(x, Needs)}
    for name, field, unit, form in _ALONE:
        needed = {side: {field: x[field] / unit} for side, x in both.items() if x[field] is not None}
        if needed:
            rows.append([f"alone: {name}", *_cells(needed, field, form, sides)])
    failed = [f"{SIDES[side]} alone was not measured: {x}." for side, x in alone.items() if isinstance(x, str)]
    notes = [*failed, *_speed_notes(findings)]
    return f"<h2>Speed and memory</h2>\n{table(['', *sides.values()], rows)}\n" + "\n".join(
        f'<p class="note">{escape(note)}</p>' for note in notes
    )


def _cells(figures: Mapping[str, Mapping[str, float | None]], name: str, form: str, sides: Iterable[str]) -> list[str]:
    values = [figures.get(side, {}).get(name) for side in sides]
    return ["" if value is None else form.format(value) for value in values]


def _speed_notes(findings: Findings) -> list[str]:
    record = findings.record
    notes = [
        *(["transformers takes its step after the two others."] if record.has_transformers else []),
        "Both train in one process, a step each in turn, and the order changes with every step: JAX, PyTorch, "
        "PyTorch, JAX. A step's time runs from a batch on the device to finished updated parameters "
        "(block_until_ready; synchronize on a GPU). It does not include loading batches, drawing masks or this report. "
        "JAX may take a compiled program from its cache on disk. Both sides compute float32 products in full float32: "
        "no TF32.",
    ]
    if findings.alone:
        notes.append(
            f"Alone: {ALONE_STEPS} steps in a process that imports only one framework, with the same weights, batches "
            "and allocator settings. Its memory is the peak resident size: interpreter, libraries, compiler, "
            "parameters, optimizer and activations. In the common process both share the allocator, so memory cannot "
            "be attributed to one side."
        )
    others = record.other_work()
    if others is not None:
        notes.append(f"Other work took {others:.0%} of the processors' time during the comparison.")
    if findings.plan.dropout == "shared":
        notes.append("With shared dropout, JAX's step draws masks but PyTorch's does not: compare the times alone.")
    if findings.machine.vendor == "AuthenticAMD" and findings.machine.device.startswith("cpu"):
        notes.append(
            "PyTorch's matrix products come from a library that is needlessly slow on AMD processors; compare the "
            "rates of one large product before you conclude anything about the frameworks."
        )
    return notes


def _setup(findings: Findings) -> str:
    plan, machine = findings.plan, findings.machine
    experiment = plan.experiment
    rows = [
        ["experiment", escape(plan.name)],
        ["seeds", ", ".join(map(str, plan.seeds))],
        ["optimizer", escape(_fields(experiment.optimizer))],
        [
            "training",
            escape(f"the first {plan.steps} steps of a schedule over {experiment.training.steps}"),
        ],
        ["torch.compile", "yes" if plan.torch_compile else "no"],
        ["device", escape(machine.device)],
        ["processor", escape(str(machine))],
        ["PyTorch threads", str(findings.torch_threads)],
        ["system", escape(machine.system)],
        *([escape(name), escape(number)] for name, number in machine.versions.items()),
    ]
    body = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    note = "Every field of the experiment is in report.json, every step in curves.csv."
    return f'<h2>Setup</h2>\n<table class="facts"><tbody>{body}</tbody></table>\n<p class="note">{note}</p>'


def _fields(config: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in vars(config).items())
