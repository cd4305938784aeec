"""A line chart as inline SVG, without any library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 14, 28
_COLOURS = ("#1f6feb", "#d1591f", "#2da44e")
_MOST_POINTS = 800


@dataclass(frozen=True)
class Series:
    """``points`` are (x, y); y None is a gap (nothing measured), NaN or infinite is marked with a red line."""

    name: str
    points: Sequence[tuple[float, float | None]]


def curve_svg(series: Sequence[Series]) -> str:
    """All series in one frame with common axes; a legend if there are several."""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points if y is not None and math.isfinite(y)]
    x_low, x_high = _span(xs)
    y_low, y_high = _span(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        return across, HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)

    parts = [_axis(place, (x_low, x_high), (y_low, y_high))]
    for index, each in enumerate(series):
        colour = _COLOURS[index % len(_COLOURS)]
        for x in (x for x, y in each.points if y is not None and not math.isfinite(y)):
            at = place(x, y_low)[0]
            line = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
            parts.append(f'<line {line} stroke="#cf222e"><title>not finite at {x:g}</title></line>')
        for run in _runs(_thin(each.points)):
            places = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in run))
            if len(run) == 1:
                a, _, b = places.partition(",")
                parts.append(f'<circle cx="{a}" cy="{b}" r="2.5" fill="{colour}"/>')
            else:
                parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(series) > 1:
            name = html.escape(each.name)
            parts.append(f'<text x="{_LEFT + 8 + 90 * index}" y="{_TOP + 12}" fill="{colour}">{name}</text>')
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-size="11" font-family="sans-serif"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>{"".join(parts)}</svg>'


def _axis(place, xs: tuple[float, float], ys: tuple[float, float]) -> str:  # type: ignore[no-untyped-def]
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = ys[0] + share * (ys[1] - ys[0])
        at = place(xs[0], y)[1]
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{y:.3g}</text>')
        x = xs[0] + share * (xs[1] - xs[0])
        anchor = ("start", "middle", "end")[int(2 * share)]
        parts.append(
            f'<text x="{place(x, ys[0])[0]:.1f}" y="{HEIGHT - 9}" text-anchor="{anchor}" fill="#555">{x:.6g}</text>'
        )
    return "".join(parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 0.5
        return low - pad, high + pad
    return low, high


def _thin(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most 800 points: of each stretch the lowest and the highest are kept, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        good = [(x, y) for x, y in stretch if y is not None and math.isfinite(y)]
        if good:
            kept += sorted({min(good, key=lambda p: p[1]), max(good, key=lambda p: p[1])})
        if len(good) < len(stretch):
            kept.append((stretch[-1][0], None))
    return kept


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Cut at gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
