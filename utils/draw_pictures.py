"""Draws pictures of the documentation from files of this repository.

    python utils/draw_pictures.py lora      docs/pictures/lora.svg, the low-rank update
    python utils/draw_pictures.py speed     docs/pictures/speed.png, the tables of benchmarks/

docs/pictures/quickstart.png is not drawn here. It is quickstart_output/learning_curves.png, which
quickstart.sh writes.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loralib.io.atomic import atomic_write_text
from loralib.io.command_line import ArgumentParser
from loralib.io.pictures import check_can_save, save_figure
from loralib.training import process
from pictures import low_rank_update, speed

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"


def draw_lora(folder: Path) -> Path:
    """Draws the low-rank update; returns the file's path."""
    path = folder / "lora.svg"
    atomic_write_text(path, low_rank_update.draw())
    return path


def draw_speed(folder: Path) -> Path:
    """Draws the speeds, and adds them to the picture as text, too; returns the file's path."""
    path = folder / "speed.png"
    check_can_save(path)
    speeds = speed.read_speeds(speed.README.read_text(encoding="utf-8"))
    save_figure(speed.draw(speeds), path, dpi=110, description=speeds.as_text())
    return path


PICTURES: Mapping[str, Callable[[Path], Path]] = {"lora": draw_lora, "speed": draw_speed}


def main(argv: Sequence[str] | None = None) -> None:
    """Draws the pictures asked for, and prints the files' paths."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="+", choices=PICTURES, help="which ones")
    parser.add_argument(
        "--output_dir", type=Path, default=FOLDER, help="folder for them (default: docs/pictures)"
    )
    args = parser.parse_args(argv)
    for name in dict.fromkeys(args.pictures):
        print(PICTURES[name](args.output_dir))


if __name__ == "__main__":
    process.run(main)
