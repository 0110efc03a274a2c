"""Log-log plots and bars as SVG, made by hand: a picture in the docs needs no plotting library.

Each panel of ``svg`` has its operations as lines with their names at the right end, and a dashed line that grows with
n log n; each panel of ``bars_svg`` has one bar for each name, as long as its median, with its lowest and highest value.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 270, 34, 34
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
LABEL_HEIGHT = 14
LEAST_S = 1e-4


@dataclass(frozen=True)
class Line:
    """One operation: seconds by size."""

    name: str
    values: Mapping[int, float]


@dataclass(frozen=True)
class Panel:
    """One axis with its operations."""

    title: str
    lines: Sequence[Line]


def svg(panels: Sequence[Panel]) -> str:
    """One picture, a panel below the other."""
    inside = "\n".join(text for number, panel in enumerate(panels) for text in _panel(panel, number * HEIGHT))
    return _picture(HEIGHT * len(panels), inside)


@dataclass(frozen=True)
class _Scale:
    """From sizes and seconds to places in the picture."""

    first: float
    last: float
    low: float
    high: float
    top: float

    def x(self, size: float) -> float:
        return LEFT + (math.log10(size) - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, seconds: float) -> float:
        share = (math.log10(max(seconds, LEAST_S)) - self.low) / (self.high - self.low)
        return self.top + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True)
class Bars:
    """One quantity of several sides: the median, the lowest and the highest value of each."""

    title: str
    values: Mapping[str, tuple[float, float, float]]


NAMES_WIDTH, BAR_HEIGHT, BAR_PITCH, HEAD_HEIGHT = 170, 12, 18, 30


def bars_svg(panels: Sequence[Bars]) -> str:
    """One picture, a panel below the other, the shortest bar of each first."""
    parts, top = list[str](), 0.0
    for panel in panels:
        parts += _bars(panel, top)
        top += HEAD_HEIGHT + BAR_PITCH * len(panel.values)
    return _picture(top + BAR_PITCH / 2, "\n".join(parts))


def _bars(panel: Bars, top: float) -> Iterator[str]:
    yield _text(8, top + 18, panel.title, weight="bold")
    longest = max((highest for _, _, highest in panel.values.values()), default=0.0) or 1.0
    scale = (WIDTH - NAMES_WIDTH - 120) / longest
    ordered = sorted(panel.values.items(), key=lambda named: named[1][0])
    for number, (name, (median, lowest, highest)) in enumerate(ordered):
        y = top + HEAD_HEIGHT + BAR_PITCH * number
        middle, low, high = (NAMES_WIDTH + scale * value for value in (median, lowest, highest))
        color = COLORS[0] if name == "unbroken" else "#bbb"
        yield _text(NAMES_WIDTH - 6, y + 10, name, anchor="end")
        size = f'width="{middle - NAMES_WIDTH:.1f}" height="{BAR_HEIGHT}"'
        yield f'<rect x="{NAMES_WIDTH}" y="{y:.1f}" {size} fill="{color}"/>'
        yield f'<path d="M{low:.1f} {y + BAR_HEIGHT / 2:.1f}H{high:.1f}" stroke="#222"/>'
        yield _text(high + 6, y + 10, f"{median:.3g}")


def _picture(height: float, inside: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="{WIDTH}" height="{height:g}" fill="white"/>\n'
        f"{inside}\n</svg>\n"
    )


def _panel(panel: Panel, top: float) -> Iterator[str]:
    sizes = sorted({size for line in panel.lines for size in line.values})
    seconds = [max(value, LEAST_S) for line in panel.lines for value in line.values.values()]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    scale = _Scale(math.log10(sizes[0]), math.log10(sizes[-1]), low, max(high, low + 1), top)
    yield _text(LEFT, top + 16, f"CPU seconds over {panel.title}", weight="bold")
    for power in range(low, max(high, low + 1) + 1):
        y = scale.y(10.0**power)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        yield _text(LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end")
    for size in sizes:
        yield f'<path d="M{scale.x(size):.1f} {top + TOP}V{top + HEIGHT - BOTTOM}" stroke="#ddd"/>'
        yield _text(scale.x(size), top + HEIGHT - BOTTOM + 16, f"{size:,}", anchor="middle")
    yield from _limit(sizes, max(seconds), scale)
    colors = dict(zip((line.name for line in panel.lines), COLORS * 4, strict=False))
    for line in panel.lines:
        points = " ".join(f"{scale.x(n):.1f},{scale.y(s):.1f}" for n, s in sorted(line.values.items()))
        yield f'<polyline points="{points}" fill="none" stroke="{colors[line.name]}" stroke-width="1.6"/>'
    yield from _labels(panel.lines, scale, colors)


def _limit(sizes: Sequence[int], highest: float, scale: _Scale) -> Iterator[str]:
    """n log n through the highest point, as far as it is inside the panel."""
    last = sizes[-1]
    points = []
    for step in range(101):
        size = 10 ** (scale.first + (scale.last - scale.first) * step / 100)
        seconds = highest * size * math.log(size) / (last * math.log(last))
        if seconds >= 10**scale.low:
            points.append(f"{scale.x(size):.1f},{scale.y(seconds):.1f}")
    yield f'<polyline points="{" ".join(points)}" fill="none" stroke="#888" stroke-dasharray="5 4"/>'


def _labels(lines: Sequence[Line], scale: _Scale, colors: Mapping[str, str]) -> Iterator[str]:
    """Names at the right end, the highest first, moved apart so that none covers another."""
    ends = sorted((scale.y(line.values[max(line.values)]), line.name) for line in lines)
    lowest = scale.top + HEIGHT - BOTTOM + 10
    placed: list[float] = []
    for number, (y, _) in enumerate(ends):
        room = lowest - (len(ends) - 1 - number) * LABEL_HEIGHT
        placed.append(min(max(y, placed[-1] + LABEL_HEIGHT if placed else y), room))
    for (y, name), label_y in zip(ends, placed, strict=True):
        x = WIDTH - RIGHT
        yield f'<path d="M{x + 2} {y:.1f}L{x + 14} {label_y:.1f}" stroke="{colors[name]}" fill="none"/>'
        yield _text(x + 17, label_y + 4, name, color=colors[name])


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", color: str = "#222") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'
