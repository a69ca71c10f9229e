"""Draws where a trained encoder-decoder looks: `python docs/draw_attention.py runs/dates "fr: mercredi 17 mars 2021"`.

A row for each token of the answer, a column for each of the source. A cell is the weight of the decoder's
cross-attention in one layer, the mean of its heads, at the step that chose the row's token.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jinja2 import Template

from jax_tformer import DecodingConfig, InputError, generate
from jax_tformer.config.errors import require
from jax_tformer.functional import EncoderDecoderTransformer
from jax_tformer.runs.folder import RunFolder, Trained, load_trained

CELL, LEFT, TOP = 25, 56, 34
BLUE, GREY = "#2f7de1", "#727b85"
FAINT = 0.02
"""What weighs less is not drawn."""


def attended(trained: Trained, source: str, layer: int) -> tuple[list[str], list[str], np.ndarray]:
    """The tokens of the source, those of the answer, and the weights `[T, S]` between them."""
    net, tokenizer = trained.net, trained.tokenizer
    start, end = tokenizer.start_id, tokenizer.end_id
    if not isinstance(net, EncoderDecoderTransformer) or start is None or end is None:
        raise InputError("the run's model has no cross-attention; expected an encoder-decoder, such as runs/dates")
    ids = [*tokenizer.encode(source).tolist(), end]
    greedy = DecodingConfig(max_new_tokens=40, temperature=0.0)
    [answer] = generate(net, trained.params, [ids], greedy, start_id=start, end_id=end).rows(0)
    target = [start, *answer[:-1]]
    outputs = net.bind(trained.params)(jnp.array([ids]), jnp.array([target]), capture=True)
    assert outputs.decoder is not None
    assert outputs.decoder.cross_attention is not None
    layers = outputs.decoder.cross_attention
    require(0 <= layer < len(layers), f"--layer is {layer}; expected 0 to {len(layers) - 1}, of this model's decoder")
    source_names, answer_names = (
        ["end" if each == end else tokenizer.decode([each]) for each in row] for row in (ids, answer)
    )
    return source_names, answer_names, np.asarray(layers[layer, 0].mean(0))


PICTURE = Template(
    """<svg xmlns="http://www.w3.org/2000/svg" \
viewBox="0 0 {{left + cell * across + 8}} {{top + cell * down + 8}}" role="img">
<title>{{source[:-1]|join}} -> {{answer[:-1]|join}}</title>
<style>text { font: 600 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
text-anchor: middle; fill: {{grey}} } .ground { fill: {{grey}}; fill-opacity: 0.1 }</style>
<rect x="{{left}}" y="{{top}}" width="{{cell * across}}" height="{{cell * down}}" class="ground"/>
{%- for row, column, weight in cells %}
<rect x="{{left + cell * column + 1}}" y="{{top + cell * row + 1}}" width="{{cell - 2}}" height="{{cell - 2}}" \
fill="{{blue}}" fill-opacity="{{"%.2f"|format(weight)}}"/>
{%- endfor %}
{%- for token in source %}
<text x="{{left + cell * (loop.index0 + 0.5)}}" y="{{top - 10}}">{{token|replace(" ", "␣")}}</text>
{%- endfor %}
{%- for token in answer %}
<text x="{{left - 20}}" y="{{top + cell * (loop.index0 + 0.5) + 5}}">{{token|replace(" ", "␣")}}</text>
{%- endfor %}
</svg>
""",
    autoescape=True,
    keep_trailing_newline=True,
)


def picture(source: list[str], answer: list[str], weights: np.ndarray) -> str:
    """The weights as SVG."""
    cells = [(row, column, weights[row, column]) for row, column in np.argwhere(weights >= FAINT)]
    sizes = {"cell": CELL, "left": LEFT, "top": TOP, "across": len(source), "down": len(answer)}
    drawn: str = PICTURE.render(sizes, source=source, answer=answer, cells=cells, grey=GREY, blue=BLUE)
    return drawn


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[2])
    options.add_argument("run", type=Path, help="the folder of a trained encoder-decoder")
    options.add_argument("source", help="what it reads")
    options.add_argument("--layer", type=int, default=0, help="of the decoder, from 0 (default)")
    options.add_argument("--out", type=Path, default=Path(__file__).with_name("attention.svg"))
    given = options.parse_args()
    try:
        source, answer, weights = attended(load_trained(RunFolder(given.run)), given.source, given.layer)
    except InputError as error:
        options.error(str(error))
    given.out.write_text(picture(source, answer, weights), "utf-8")
    print(f"{''.join(source[:-1])} -> {''.join(answer[:-1])}: {given.out}")


if __name__ == "__main__":
    main()
