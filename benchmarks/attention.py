"""What each attention mechanism and each captioner costs: `python benchmarks/attention.py`.

Mechanisms: forward and backward at 50 images, 36 and 100 regions (feature maps of 6 x 6 and
10 x 10 for those that need one), 8 heads of 64, against `dot` in the same run. What linear layers
of its own a mechanism has beyond `dot`'s four is timed apart, on the same inputs: "without them" is
the rest against `dot`. Captioners: a training step (forward, loss, backward, update) of every model
at its paper's sizes, against `transformer` in the same run.

All take turns, and the best turn counts: a busy machine only ever slows down. On a GPU if there is
one. --write puts the tables into `benchmarks/README.md`, a GPU's into `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from regionprep import __version__, manifests, models
from regionprep.memory import keep_freed_memory
from regionprep.models import Regions, attention
from regionprep.models.attention import MECHANISMS, Layout, Mechanism
from regionprep.training.losses import cross_entropy

README = Path(__file__).parent / "README.md"
RESULTS = README.parent / "results"
TITLE = "## What attention costs"
IMAGES, WIDTH, HEADS = 50, 512, 8
GRIDS = {36: (6, 6), 100: (10, 10)}
CAPTIONS, WORDS = 5, 16
DOT_LAYERS = 4

Work = Callable[[], object]


def main() -> None:
    """Time what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--images", type=int, help="images of a captioner's batch (50; CPU: 2)")
    parser.add_argument("--models", nargs="*", help="these models only, and transformer")
    parser.add_argument("--write", action="store_true", help="keep the tables")
    options = parser.parse_args()
    keep_freed_memory()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = options.images or (IMAGES if device.type == "cuda" else 2)
    chosen = options.models or manifests.names("models")
    report = "\n".join(
        [
            f"{TITLE}, on {_name(device)}",
            "",
            f"torch {torch.__version__}, float32, regionprep {__version__}; made by "
            f"`python benchmarks/attention.py --turns {options.turns} --images {images} --write`.",
            "",
            *_mechanisms(device, options.turns),
            *_captioners(device, options.turns, images, chosen),
        ]
    )
    print(report)
    if options.write:
        keep(report, device)


def keep(report: str, device: torch.device) -> None:
    """Write the tables: a CPU's into `benchmarks/README.md`, a GPU's into a file of its name."""
    if device.type == "cuda":
        name = _name(device).lower().replace(" ", "-")
        (RESULTS / f"attention-{name}.md").write_text(report + "\n", encoding="utf-8")
        return
    text = README.read_text(encoding="utf-8")
    before = text[: text.index(TITLE)] if TITLE in text else text + "\n"
    README.write_text(before + report.replace("\n## ", "\n### ") + "\n", encoding="utf-8")


def _mechanisms(device: torch.device, turns: int) -> list[str]:
    """Return the table of the mechanisms."""
    lines = [
        f"## Mechanisms: forward and backward, {IMAGES} images, {HEADS} heads of {WIDTH // HEADS}",
        "",
        "| mechanism | " + " | ".join(f"{n} regions, ms | x `dot` | without them" for n in GRIDS),
        "| --- |" + " ---: |" * 3 * len(GRIDS),
    ]
    measured = {regions: _time_mechanisms(device, regions, turns) for regions in GRIDS}
    for name in MECHANISMS:
        cells = []
        for times, extras in measured.values():
            whole, dot = times[name], times["dot"]
            cells.append(f"{whole * 1e3:.1f} | {whole / dot:.2f}")
            cells.append(f"{(whole - extras[name]) / dot:.2f}")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    lines[2] += " |"
    return [*lines, ""]


def _time_mechanisms(
    device: torch.device, regions: int, turns: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of each mechanism, and those of the linear layers that `dot` lacks."""
    works: dict[str, Work] = {}
    layers: dict[str, Work] = {}
    for name in MECHANISMS:
        torch.manual_seed(0)
        module = attention.build(name, width=WIDTH, heads=HEADS, grid=GRIDS[regions]).to(device)
        works[name] = _look(module, device, regions)
        layers[name] = _linear_layers(module, works[name])
    return best_of(works, device, turns), best_of(layers, device, turns)


def _look(module: Mechanism, device: torch.device, regions: int) -> Work:
    """Return a forward and backward of self-attention over random regions."""
    hidden = torch.randn(IMAGES, regions, WIDTH, device=device, requires_grad=True)
    mask = torch.ones(IMAGES, regions, dtype=torch.bool, device=device)
    corner = torch.rand(IMAGES, regions, 2, device=device) * 300
    boxes = torch.cat([corner, corner + 20 + torch.rand_like(corner) * 200], -1)
    layout = Layout(boxes, torch.full((IMAGES, 2), 640.0, device=device), GRIDS[regions])

    def work() -> None:
        module.zero_grad()
        hidden.grad = None
        module(hidden, hidden, hidden, mask=mask, query_mask=mask, layout=layout).sum().backward()

    return work


def _linear_layers(module: Mechanism, work: Work) -> Work:
    """Return a forward and backward of the linear layers that `module` has and `dot` does not."""
    seen: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
        assert isinstance(layer, nn.Linear)
        seen.append((layer, inputs[0].detach().requires_grad_()))

    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_hook(note) for layer in linear]
    work()
    for hook in hooks:
        hook.remove()
    extra = seen[DOT_LAYERS:]

    def layers_alone() -> None:
        for layer, inputs in extra:
            inputs.grad = None
            layer.zero_grad()
            layer(inputs).sum().backward()

    return layers_alone


def _captioners(device: torch.device, turns: int, images: int, names: list[str]) -> list[str]:
    """Return the table of the captioners; one is in memory at a time, next to the first."""
    lines = [
        f"## Captioners: a training step, {images} images of 36 regions or the paper's "
        f"feature map, {CAPTIONS} captions of {WORDS} words each",
        "",
        "| model | parameters, M | ms | x `transformer` |",
        "| --- | ---: | ---: | ---: |",
    ]
    peer = _training_step("transformer", device, images)
    for name in names:
        step = _training_step(name, device, images)
        times = best_of({"peer": peer[1], "own": step[1]}, device, turns)
        lines.append(
            f"| `{name}` | {step[0] / 1e6:.2f} | {times['own'] * 1e3:.0f} | "
            f"{times['own'] / times['peer']:.2f} |"
        )
        del step
    return lines


def _training_step(name: str, device: torch.device, images: int) -> tuple[int, Work]:
    """Return a model's number of parameters, and one step of its training."""
    torch.manual_seed(0)
    manifest = manifests.load("models", name)
    sizes = manifest.parameters or manifests.ParameterCount(count=0)
    model = models.build(
        manifest.captioner,
        feature_width=sizes.feature_width,
        vocabulary_size=sizes.vocabulary_size,
        max_length=WORDS,
        pad=0,
        bos=1,
        eos=2,
        grid=sizes.grid,
        **manifest.arguments,
    )
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    regions = _regions(images, sizes.grid, sizes.feature_width, device)
    tokens = torch.randint(3, sizes.vocabulary_size, (images, CAPTIONS, WORDS + 1)).to(device)
    inputs, targets = tokens, tokens.roll(-1, dims=-1)
    criterion = partial(cross_entropy, pad=0)

    def work() -> None:
        model.loss(regions, inputs, targets, criterion).backward()
        optimizer.step()
        optimizer.zero_grad()

    return sum(weight.numel() for weight in model.parameters()), work


def _regions(
    images: int, grid: tuple[int, int] | None, width: int, device: torch.device
) -> Regions:
    """Return random regions: 36 an image, or the cells of a feature map."""
    count = grid[0] * grid[1] if grid else 36
    corner = torch.rand(images, count, 2, device=device) * 300
    return Regions(
        torch.randn(images, count, width, device=device),
        torch.ones(images, count, dtype=torch.bool, device=device),
        torch.cat([corner, corner + 20 + torch.rand_like(corner) * 200], -1),
        torch.full((images, 2), 640.0, device=device),
        grid,
    )


def best_of(works: dict[str, Work], device: torch.device, turns: int) -> dict[str, float]:
    """Return the seconds of the best turn of each work, after one turn that does not count."""
    best: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - began
            if turn:
                best[name] = min(spent, best.get(name, spent))
    return best


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU cores ({platform.machine()})"


if __name__ == "__main__":
    main()
