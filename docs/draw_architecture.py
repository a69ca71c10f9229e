"""Draws the encoder-decoder with the names that its parts have in the code: docs/build_walkthrough.py writes it."""

from collections.abc import Sequence

WIDTH = 700
HALF, TALL, THIN = 112, 46, 24
"""Half the width of a box; the height of one, and of a norm."""
ENCODER, DECODER = 172, 528
"""Where the two columns have their middle."""
BLOCK = 124
"""From one sub-layer to the next."""

GREY = "#727b85"
# Boxes bring their own ground; lines and other text have a grey that shows on white as on black.
STYLE = f"""
  text {{ font: 12px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; text-anchor: middle; fill: {GREY} }}
  .name {{ font: 600 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1b2129 }}
  .shape {{ font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
  .title {{ font-size: 14px; font-weight: 600 }}
  .inside {{ fill: #434c56 }}
  .start {{ text-anchor: start }}
  .line {{ fill: none; stroke: {GREY}; stroke-width: 1.5 }}
  .frame {{ fill: {GREY}; fill-opacity: 0.1; stroke: {GREY}; stroke-opacity: 0.5 }}
  .embedding {{ fill: #f7cfd8 }} .attention {{ fill: #ffdc9e }} .feedforward {{ fill: #b9e0f2 }}
  .norm {{ fill: #eceeb0 }} .head {{ fill: #d6d0f5 }} .maybe {{ stroke: {GREY}; stroke-dasharray: 4 3 }}
"""


class Drawing:
    """SVG elements, one after the other."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "note") -> None:
        """A line of text; `x` is its middle, or its start where the kind says so."""
        self.elements.append(f'<text x="{x}" y="{y}" class="{kind}">{text}</text>')

    def path(self, way: str, *, tip: bool = True) -> None:
        """A line, with an arrow's tip or without."""
        end = ' marker-end="url(#tip)"' if tip else ""
        self.elements.append(f'<path d="{way}" class="line"{end}/>')

    def box(self, x: float, y: float, kind: str, name: str, note: str = "") -> None:
        """A part of the model, thin without a note; `x` is its middle, `y` its upper edge."""
        height, round_off = (TALL, 6) if note else (THIN, 12)
        self.elements.append(
            f'<rect x="{x - HALF}" y="{y}" width="{2 * HALF}" height="{height}" rx="{round_off}" class="{kind}"/>'
        )
        self.text(x, y + (20 if note else 16.5), name, "name")
        if note:
            self.text(x, y + 37, note, "inside")

    def stack(self, x: float, y: float, name: str, sublayers: Sequence[tuple[str, str, str]], side: int) -> float:
        """The repeated block in its frame, and the final norm; returns where that ends.

        `sublayers` are kind, name and note; the way around each is on one side (-1: left) of the column.
        """
        left, height = x - HALF - 36, 40 + BLOCK * len(sublayers) - 11
        self.elements.append(
            f'<rect x="{left}" y="{y}" width="{2 * HALF + 72}" height="{height}" rx="12" class="frame"/>'
        )
        self.text(left + 12, y + 20, name, "shape start")
        self.text(x + HALF + 16, y + 20, "× L", "shape")
        top = y + 40
        for kind, sublayer, note in sublayers:
            self.path(f"M {x} {top - BLOCK + TALL + 31 + THIN if top > y + 40 else y - 22} V {top}")
            self.sublayer(x, top, kind, sublayer, note, side)
            top += BLOCK
        end = y + height + 22
        self.path(f"M {x} {top - BLOCK + TALL + 31 + THIN} V {end}")
        self.box(x, end, "norm maybe", "final_norm")
        return end + THIN

    def sublayer(self, x: float, y: float, kind: str, name: str, note: str, side: int) -> None:
        """A sub-layer, the way around it, their sum, and the norm."""
        plus, out = y + TALL + 15, x + side * (HALF + 18)
        self.box(x, y, kind, name, note)
        self.path(f"M {x} {y + TALL} V {plus - 8}", tip=False)
        self.path(
            f"M {x} {y - 12} H {out - side * 8} Q {out} {y - 12} {out} {y - 4} "
            f"V {plus - 8} Q {out} {plus} {out - side * 8} {plus} H {x + side * 9}"
        )
        self.elements.append(f'<circle cx="{x}" cy="{plus}" r="8" class="line"/>')
        self.path(f"M {x - 4} {plus} H {x + 4} M {x} {plus - 4} V {plus + 4}", tip=False)
        self.path(f"M {x} {plus + 8} V {plus + 16}", tip=False)
        self.box(x, plus + 16, "norm", f"{name}_norm")

    def svg(self, height: float) -> str:
        """The whole picture."""
        tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
        tip += ' markerUnits="userSpaceOnUse"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
                "<title>The encoder-decoder. The decoder's cross-attention reads what the encoder gives.</title>",
                f"<style>{STYLE}</style>",
                f'<defs>{tip}><path d="M 0 0 L 8 4 L 0 8 z" fill="{GREY}"/></marker></defs>',
                *self.elements,
                "</svg>\n",
            ]
        )


def architecture() -> str:
    """The picture as SVG."""
    draw = Drawing()
    attention, feedforward = "attention", ("feedforward", "feedforward", "each position by itself")
    everyone, earlier = "every token sees every token", "a token sees itself and earlier ones"

    def embedded(x: float, y: float, name: str, shape: str) -> float:
        draw.text(x, y - 42, name, "title")
        draw.text(x, y - 26, shape, "shape")
        draw.path(f"M {x} {y - 20} V {y}")
        draw.box(x, y, "embedding", f"{name}_embedding", "√D · tokens + positions")
        return y + TALL + 22

    frame = embedded(ENCODER, 60, "source", "[B, S]")
    own = [(attention, "self_attention", everyone), feedforward]
    end = draw.stack(ENCODER, frame, "encoder.blocks", own, -1)
    # The decoder begins so much lower that its cross-attention stands beside the encoder's end.
    cross = end + 8
    frame = embedded(DECODER, cross - BLOCK - 40 - 22 - TALL, "target", "[B, T], shifted right")
    across = (attention, "cross_attention", "query: x; key, value: memory")
    own = [(attention, "self_attention", earlier), across, feedforward]
    low = draw.stack(DECODER, frame, "decoder.blocks", own, 1)
    draw.path(
        f"M {ENCODER} {end} V {cross + 13} Q {ENCODER} {cross + 23} {ENCODER + 10} {cross + 23} H {DECODER - HALF}"
    )
    draw.text(ENCODER + 90, cross + 16, "memory", "title")
    draw.text(ENCODER + 90, cross + 40, "[B, S, D]", "shape")
    draw.path(f"M {DECODER} {low} V {low + 18}")
    draw.box(DECODER, low + 18, "head", "head", "to the vocabulary")
    draw.path(f"M {DECODER} {low + 18 + TALL} V {low + 36 + TALL}")
    draw.text(DECODER, low + 54 + TALL, "logits", "title")
    draw.text(DECODER, low + 70 + TALL, "[B, T, V]", "shape")

    left = ENCODER - HALF - 36
    notes = (
        "Post-norm, as drawn and as in the paper:",
        "x = norm(x + f(x)), and no final_norm.",
        "Pre-norm: x = x + f(norm(x)),",
        "and a final_norm ends each stack.",
    )
    for number, note in enumerate(notes):
        draw.text(left, low - 60 + 19 * number + 8 * (number > 1), note, "note start")
    return draw.svg(low + 80 + TALL)
