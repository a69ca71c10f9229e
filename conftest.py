"""How the tests run: compiled in a hurry, shapes checked, with the measured parity figures at the end."""

import os
from typing import Any

# Most of a test's time is compilation, and this makes it six times as short. What depends on optimised code (float32
# quality, models of full size) asks for it: see OPTIMISED in parity_tests/bridge.py.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
from jaxtyping import install_import_hook

# Before anything of ours is imported: from here on, every call of these modules checks its annotated shapes.
install_import_hook(["jax_tformer.nn", "jax_tformer.models", "jax_tformer.decoding"], "beartype.beartype")
# A broadcast that nobody wrote down is a mistake waiting to happen.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The worst figure of each preset and gate, of all tests that recorded one."""
    worst: dict[tuple[str, str], tuple[float, float]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, value in getattr(report, "user_properties", ()):
                if name == "parity":
                    preset, gate, figure, bar, _ = value
                    worst[preset, gate] = max(worst.get((preset, gate), (figure, bar)), (figure, bar))
    if not worst:
        return
    gates = sorted({gate for _, gate in worst})
    presets = list(dict.fromkeys(preset for preset, _ in worst))
    width = max(map(len, presets))
    terminalreporter.section("parity: the worst figure of each preset and gate")
    terminalreporter.write_line(" " * width + "".join(f"  {gate:>22}" for gate in gates))
    for preset in presets:
        cells = [worst.get((preset, gate)) for gate in gates]
        shown = "".join("  " + ("-" if cell is None else f"{cell[0]:.1e}").rjust(22) for cell in cells)
        terminalreporter.write_line(f"{preset:<{width}}{shown}")
    bars = {gate: bar for (_, gate), (_, bar) in worst.items()}
    terminalreporter.write_line(f"{'bar':<{width}}" + "".join("  " + f"{bars[gate]:.0e}".rjust(22) for gate in gates))
