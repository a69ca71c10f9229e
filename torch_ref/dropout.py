"""Dropout that draws its own mask, or applies one that it is given: another framework's draw, say."""

from collections.abc import Mapping

from torch import Tensor, nn


class Dropout(nn.Dropout):
    """nn.Dropout; with `keep` (True = kept) exactly that mask, whether training or not."""

    keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Zeroes what is not kept and divides the rest by 1 - p."""
        return super().forward(x) if self.keep is None else (x / (1 - self.p)).masked_fill(~self.keep, 0.0)


def inject(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Gives each dropout site of `model` whose rate is above 0 its mask; an empty mapping takes all masks away.

    `masks` are boolean, True = kept, by the name of the site (`decoder.blocks.0.feedforward.dropout`). Raises
    ValueError, which lists both sides, unless there is one mask for each site with a rate above 0.
    """
    sites = {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}
    expected = {name for name, site in sites.items() if site.p > 0}
    if masks and masks.keys() != expected:
        without, unknown = sorted(expected - masks.keys()), sorted(masks.keys() - expected)
        raise ValueError(f"dropout masks do not fit: sites without a mask {without}, masks without a site {unknown}")
    for name, site in sites.items():
        site.keep = masks.get(name)
