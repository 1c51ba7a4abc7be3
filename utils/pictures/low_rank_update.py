"""Draws the low-rank update: the frozen weight, A and B beside it, and the sum.

The SVG is built here element by element, so that its bytes depend only on this file. It has a light
background, so that it looks the same on dark and light pages.
"""

from collections.abc import Sequence
from xml.etree import ElementTree

TITLE = "The low-rank update of LoRA"
DESCRIPTION = (
    "The input x takes two ways. One goes through the frozen weight W0, of shape out by in. The "
    "other goes through A, of shape r by in, then through B, of shape out by r, and is multiplied "
    "by alpha / r. The sum of both is the output h."
)
WIDTH, HEIGHT = 860, 372
CARD, EDGE, INK, SOFT = "#ffffff", "#d0d7de", "#1f2328", "#59636e"
FROZEN, FROZEN_EDGE = "#dbe4ee", "#6b7f95"
TRAINED, TRAINED_EDGE = "#ffd9a8", "#c2650c"
VECTOR, VECTOR_EDGE = "#e6e0f5", "#6f5fa6"
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MATH = "'STIX Two Math', Cambria, 'Times New Roman', 'DejaVu Serif', serif"

TIMES, ALPHA = "\N{MULTIPLICATION SIGN}", "\N{GREEK SMALL LETTER ALPHA}"

Point = tuple[float, float]


class Drawing:
    """An SVG to which each call adds elements."""

    def __init__(self) -> None:
        self.root = ElementTree.Element(
            "svg",
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            width=str(WIDTH),
            height=str(HEIGHT),
            role="img",
        )
        self.root.set("aria-labelledby", "title description")
        ElementTree.SubElement(self.root, "title", id="title").text = TITLE
        ElementTree.SubElement(self.root, "desc", id="description").text = DESCRIPTION

    def add(self, tag: str, **attributes: object) -> ElementTree.Element:
        """Adds and returns an element; underscores in attribute names stand for hyphens."""
        named = {name.replace("_", "-"): f"{value}" for name, value in attributes.items()}
        return ElementTree.SubElement(self.root, tag, named)

    def as_text(self) -> str:
        """Returns the file, one element per line; text elements get no additional white space."""
        self.root.text = "\n"
        for element in self.root:
            element.tail = "\n"
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str, radius: float
    ) -> None:
        """Adds a rectangle with round corners; x and y are its upper left corner."""
        place = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        self.add("rect", **place, fill=fill, stroke=edge, stroke_width=1.5)

    def shape(self, corners: Sequence[Point], fill: str, edge: str) -> None:
        """Adds a polygon."""
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self.add(
            "polygon",
            points=points,
            fill=fill,
            stroke=edge,
            stroke_width=1.5,
            stroke_linejoin="round",
        )

    def text(
        self,
        x: float,
        y: float,
        parts: str | Sequence[tuple[str, str]],
        size: float = 14,
        fill: str = INK,
        weight: str = "normal",
    ) -> None:
        """Adds a line of text.

        Args:
            x, y: the position of its middle, on the baseline.
            parts: the text, or pieces of it: (kind, text), of kind "math", "sub" or "plain".
            size: the font's size.
            fill: the text's color.
            weight: the font's weight.
        """
        line = self.add(
            "text",
            x=x,
            y=y,
            font_family=SANS,
            font_size=size,
            fill=fill,
            text_anchor="middle",
            font_weight=weight,
        )
        if isinstance(parts, str):
            line.text = parts
            return
        shift = 0.0
        for kind, text in parts:
            piece = ElementTree.SubElement(line, "tspan")
            lowered = 0.28 * size if kind == "sub" else 0.0
            if lowered != shift:
                piece.set("dy", f"{lowered - shift:g}")
                shift = lowered
            if kind == "sub":
                piece.set("font-size", f"{0.68 * size:g}")
            if kind in ("math", "sub"):
                piece.set("font-family", MATH)
            if kind == "math":
                piece.set("font-style", "italic")
            piece.text = text

    def arrow(self, *corners: Point, color: str = SOFT) -> None:
        """Adds a line from corner to corner, with an arrowhead at its end."""
        *before, (x, y) = corners
        (from_x, from_y) = before[-1]
        length = ((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5
        along, across = ((x - from_x) / length, (y - from_y) / length), 5.5
        foot = (x - 11 * along[0], y - 11 * along[1])
        points = " ".join(f"{a:g},{b:g}" for a, b in [*before, foot])
        self.add(
            "polyline",
            points=points,
            fill="none",
            stroke=color,
            stroke_width=2,
            stroke_linejoin="round",
        )
        sides = [(foot[0] - s * along[1], foot[1] + s * along[0]) for s in (across, -across)]
        self.add(
            "polygon",
            points=" ".join(f"{a:g},{b:g}" for a, b in [(x, y), *sides]),
            fill=color,
        )


def draw() -> str:
    """Returns the drawing as the text of an SVG file."""
    drawing = Drawing()
    drawing.box(1, 1, WIDTH - 2, HEIGHT - 2, CARD, EDGE, 12)
    _draw_ends(drawing)
    _draw_frozen_weight(drawing)
    _draw_low_rank_path(drawing)
    _draw_formula(drawing)
    return drawing.as_text()


# The y coordinates of the upper path, of the lower one, and of input and output between them.
UPPER, LOWER, MIDDLE = 96, 232, 164
FORK, SUM = 148, 704


def _draw_ends(drawing: Drawing) -> None:
    drawing.box(56, MIDDLE - 68, 26, 136, VECTOR, VECTOR_EDGE, 4)
    drawing.text(69, MIDDLE + 7, [("math", "x")], size=22)
    drawing.text(69, MIDDLE + 90, "input", size=13, fill=SOFT)
    drawing.text(69, MIDDLE - 78, [("math", "in")], size=15, fill=SOFT)
    line = {"stroke": SOFT, "stroke_width": 2}
    drawing.add("line", x1=82, y1=MIDDLE, x2=FORK, y2=MIDDLE, **line)
    drawing.add("circle", cx=FORK, cy=MIDDLE, r=3.5, fill=SOFT)
    drawing.add("circle", cx=SUM, cy=MIDDLE, r=17, fill=CARD, stroke=INK, stroke_width=1.8)
    for ends in ((SUM - 9, MIDDLE, SUM + 9, MIDDLE), (SUM, MIDDLE - 9, SUM, MIDDLE + 9)):
        x1, y1, x2, y2 = ends
        drawing.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=INK, stroke_width=2)
    drawing.arrow((SUM + 17, MIDDLE), (777, MIDDLE))
    drawing.box(778, MIDDLE - 68, 26, 136, VECTOR, VECTOR_EDGE, 4)
    drawing.text(791, MIDDLE + 7, [("math", "h")], size=22)
    drawing.text(791, MIDDLE + 90, "output", size=13, fill=SOFT)
    drawing.text(791, MIDDLE - 78, [("math", "out")], size=15, fill=SOFT)


def _draw_frozen_weight(drawing: Drawing) -> None:
    left, width = 268, 260
    drawing.arrow((FORK, MIDDLE), (FORK, UPPER), (left, UPPER))
    drawing.box(left, UPPER - 60, width, 120, FROZEN, FROZEN_EDGE, 6)
    middle = left + width / 2
    drawing.text(middle, UPPER - 4, [("math", "W"), ("sub", "0")], size=30)
    drawing.text(middle, UPPER + 22, [("math", f"out {TIMES} in")], size=16, fill=SOFT)
    drawing.text(middle, UPPER + 47, "pretrained, frozen", size=13, fill=SOFT)
    _draw_lock(drawing, left + width - 26, UPPER - 44)
    drawing.arrow((left + width, UPPER), (SUM, UPPER), (SUM, MIDDLE - 17))


def _draw_lock(drawing: Drawing, x: float, y: float) -> None:
    """Draws a closed padlock; x and y are the middle of its shackle's top."""
    drawing.add(
        "path",
        d=f"M{x - 5:g},{y + 10:g} v-4 a5,5 0 0 1 10,0 v4",
        fill="none",
        stroke=FROZEN_EDGE,
        stroke_width=2,
    )
    drawing.add("rect", x=x - 8, y=y + 10, width=16, height=12, rx=2, fill=FROZEN_EDGE)


def _draw_low_rank_path(drawing: Drawing) -> None:
    left, middle, right = 228, 372, 398
    wide, narrow = 58, 20
    drawing.arrow((FORK, MIDDLE), (FORK, LOWER), (left, LOWER), color=TRAINED_EDGE)
    drawing.shape(
        [
            (left, LOWER - wide),
            (middle, LOWER - narrow),
            (middle, LOWER + narrow),
            (left, LOWER + wide),
        ],
        TRAINED,
        TRAINED_EDGE,
    )
    drawing.text(left + 62, LOWER + 2, [("math", "A")], size=28)
    drawing.text(left + 62, LOWER + 23, [("math", f"r {TIMES} in")], size=16, fill=SOFT)
    drawing.arrow((middle, LOWER), (right + 12, LOWER), color=TRAINED_EDGE)
    drawing.text((middle + right) / 2 + 6, LOWER - 30, [("math", "r")], size=18, fill=TRAINED_EDGE)
    start, end = right + 12, right + 156
    drawing.shape(
        [
            (start, LOWER - narrow),
            (end, LOWER - wide),
            (end, LOWER + wide),
            (start, LOWER + narrow),
        ],
        TRAINED,
        TRAINED_EDGE,
    )
    drawing.text(end - 62, LOWER + 2, [("math", "B")], size=28)
    drawing.text(end - 62, LOWER + 23, [("math", f"out {TIMES} r")], size=16, fill=SOFT)
    drawing.text(left + 62, LOWER + 78, "starts random", size=13, fill=TRAINED_EDGE)
    drawing.text(end - 62, LOWER + 78, "starts at zero", size=13, fill=TRAINED_EDGE)
    drawing.text((left + end) / 2, LOWER + 78, "trained", size=13, fill=TRAINED_EDGE, weight="600")
    drawing.arrow((end, LOWER), (594, LOWER), color=TRAINED_EDGE)
    scaling = [("plain", f"{TIMES} "), ("math", ALPHA), ("plain", " / "), ("math", "r")]
    drawing.box(595, LOWER - 19, 76, 38, CARD, TRAINED_EDGE, 19)
    drawing.text(633, LOWER + 6, scaling, size=17)
    drawing.arrow((671, LOWER), (SUM, LOWER), (SUM, MIDDLE + 17), color=TRAINED_EDGE)


def _draw_formula(drawing: Drawing) -> None:
    drawing.text(
        WIDTH / 2,
        HEIGHT - 24,
        [
            ("math", "h"),
            ("plain", "  =  "),
            ("math", "W"),
            ("sub", "0"),
            ("math", " x"),
            ("plain", "  +  "),
            ("math", ALPHA),
            ("plain", " / "),
            ("math", "r"),
            ("plain", " · "),
            ("math", "B A x"),
        ],
        size=21,
    )
