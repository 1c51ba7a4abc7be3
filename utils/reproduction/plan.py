"""Plans the runs: reads the rows of the paper's tables, and chooses the recipes asked for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loralib.io.atomic import atomic_write_text
from reproduction.runs import Run, Tree, read_json, run_of

PAPER = Path(__file__).parents[1] / "paper_results.json"
SETTINGS_NAME = "settings.json"
SMALL_SEEDS = 2
"""How many of a recipe's seeds a trial runs, unless --seeds names them."""


@dataclass(frozen=True)
class Row:
    """A row of one of the paper's tables, or a recipe that is in none.

    Args:
        name: the row's name in the paper.
        tree: the tree that its recipes are in.
        recipes: the recipes by column, in the paper's order.
        paper: the paper's figures by column; empty if it has none.
    """

    name: str
    tree: Tree
    recipes: Mapping[str, str]
    paper: Mapping[str, Any]


def read_rows(trees: Sequence[Tree]) -> dict[str, Row]:
    """Reads all rows that there are recipes for, by name."""
    paper = read_json(PAPER)
    return {
        name: Row(
            name,
            tree,
            {column: recipes[column] for column in tree.columns if column in recipes},
            paper[tree.section].get(name, {}),
        )
        for tree in trees
        for name, recipes in tree.rows().items()
    }


def choose(names: Sequence[str], rows: Mapping[str, Row]) -> dict[str, list[str]]:
    """Returns the recipes asked for by row, with those that others start from first.

    Raises:
        ValueError: a name is neither a row nor a recipe.
    """
    homes = {recipe: row.name for row in rows.values() for recipe in row.recipes.values()}
    wanted: dict[str, set[str]] = {}
    for name in names:
        if name not in rows and name not in homes:
            raise ValueError(
                f"there is no recipe or row {name!r}; rows: {', '.join(rows)}; "
                f"recipes: {', '.join(recipe for recipe in homes if recipe not in rows)}"
            )
        home = name if name in rows else homes[name]
        recipes = rows[name].recipes.values() if name in rows else [name]
        wanted.setdefault(home, set()).update(recipes)
    # MNLI, which others start from, is the first column.
    return {
        name: [recipe for recipe in rows[name].recipes.values() if recipe in recipes]
        for name, recipes in wanted.items()
    }


def plan_runs(
    chosen: Mapping[str, list[str]], rows: Mapping[str, Row], seeds: Sequence[int] | None, out: Path
) -> list[tuple[Tree, Run]]:
    """Returns the runs asked for in order: all of a row's recipes, one seed after the other."""
    runs = []
    for name, recipes in chosen.items():
        tree = rows[name].tree
        default = tree.seeds[:SMALL_SEEDS] if tree.small else tree.seeds
        for seed in dict.fromkeys(seeds or default):
            runs += [(tree, run_of(out, recipe, seed)) for recipe in recipes]
    return runs


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Checks that all runs of an output folder have the same settings, and writes these there.

    Raises:
        ValueError: existing runs were made with other settings.
    """
    path = out / SETTINGS_NAME
    if path.is_file() and (before := read_json(path)) != settings:
        raise ValueError(
            f"{out}: holds runs made with {_in_words(before)}, not with {_in_words(settings)}: "
            "give the same flags or another --output_dir, or remove this folder to begin anew"
        )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, json.dumps(settings) + "\n")


def _in_words(settings: Mapping[str, Any]) -> str:
    flags = " ".join(settings["flags"]) or "no flags"
    words = ["--small"] if settings["small"] else []
    words += [f"{name}={value}" for name, value in settings.get("environment", {}).items()]
    return " and ".join([*words, flags])
