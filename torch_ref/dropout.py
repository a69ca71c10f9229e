"""Dropout that draws its own mask, or applies one that it is given: another framework's draw, say."""

from collections.abc import Mapping

from torch import Tensor, nn


class Dropout(nn.Dropout):
    """nn.Dropout; with `keep` (True = kept) exactly that mask, whether training or not."""

    keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x with what is not kept zeroed and the rest divided by 1 - p."""
        return super().forward(x) if self.keep is None else (x / (1 - self.p)).masked_fill(~self.keep, 0.0)


def inject(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Gives every dropout site of `model` with a rate its mask; an empty mapping takes all of them away.

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
