"""A plot of a few lines as SVG text. Knows no benchmark."""

from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 96, 48, 56
NUM_TICKS = 5


class Line(NamedTuple):
    name: str
    color: str
    points: list[tuple[float, float]]  # x rising
    is_labelled_below: bool = False


def plot(lines: list[Line], title: str, x_label: str, y_label: str) -> str:
    """The values of x stand side by side, whatever lies between them. Each point carries its value, each line its name at its end."""
    columns = sorted({x for line in lines for x, _ in line.points})
    max_y = 1.1 * max(y for line in lines for _, y in line.points)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (columns.index(x) + 0.5) / len(columns)
        return LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / max_y * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 24, title, size=15), _text(WIDTH / 2 - 60, HEIGHT - 12, x_label), _text(8, TOP - 12, y_label)]
    for tick in range(NUM_TICKS + 1):
        value = max_y * tick / NUM_TICKS
        _, y = place(columns[0], value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 44, y + 4, f"{value:.1f}"))
    for x in columns:
        parts.append(_text(place(x, 0)[0] - 4, HEIGHT - BOTTOM + 18, f"{x:g}"))
    for line in lines:
        places = [place(*point) for point in line.points]
        parts.append(
            f'<polyline fill="none" stroke="{line.color}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
        )
        for (x, y), (_, value) in zip(places, line.points, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>')
            parts.append(_text(x - 12, y + (18 if line.is_labelled_below else -8), f"{value:.2f}", color=line.color))
        parts.append(_text(places[-1][0] + 8, places[-1][1] + 4, line.name, color=line.color))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, size: int = 12, color: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}">{escape(text)}</text>'
