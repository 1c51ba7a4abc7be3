"""Tests the plan: the rows of the paper's tables, their recipes, and the runs asked for."""

import json
from pathlib import Path

import pytest

from reproduction import plan

ROOT = Path(__file__).resolve().parents[3]
FACTS = ROOT.parent / "shared" / "facts"


def test_the_papers_figures_are_copied_correctly():
    path = FACTS / "paper_results.json"
    if not path.is_file():
        pytest.skip("the paper's figures are not on this machine")
    known, ours = json.loads(path.read_text()), json.loads(plan.PAPER.read_text())
    for section in ("glue_dev", "nlg_test"):
        figures = {name: row for name, row in known[section].items() if isinstance(row, dict)}
        assert ours[section] == figures


def test_every_lora_row_of_the_paper_has_its_recipes(rows):
    paper = json.loads(plan.PAPER.read_text())
    for section in ("glue_dev", "nlg_test"):
        for name, figures in paper[section].items():
            if name.endswith(" LoRA"):
                row = rows[name]
                assert row.paper == figures
                assert list(row.recipes) == [c for c in figures if c not in ("params", "avg")]
    assert rows["roberta-base LoRA"].recipes["rte"] == "roberta_base_rte"
    assert rows["gpt2-lg LoRA"].recipes["webnlg"] == "webnlg_gpt2_lg"


def test_every_recipe_is_in_one_row(rows):
    scripts = [path.stem for path in (ROOT / "NLU").glob("*.sh")]
    scripts += [path.stem for path in (ROOT / "NLG").glob("*_gpt2_*.sh")]
    assert sorted(recipe for row in rows.values() for recipe in row.recipes.values()) == sorted(
        scripts
    )


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["roberta_base_rte"], {"roberta-base LoRA": ["roberta_base_rte"]}),
        (["mnli.rdrop"], {"mnli.rdrop": ["mnli.rdrop"]}),
        (
            ["roberta_base_rte", "e2e_gpt2_md", "roberta_base_mnli", "roberta_base_rte"],
            {
                "roberta-base LoRA": ["roberta_base_mnli", "roberta_base_rte"],
                "gpt2-md LoRA": ["e2e_gpt2_md"],
            },
        ),
        (
            ["gpt2-lg LoRA", "dart_gpt2_lg"],
            {"gpt2-lg LoRA": ["e2e_gpt2_lg", "dart_gpt2_lg", "webnlg_gpt2_lg"]},
        ),
    ],
)
def test_names(rows, names, expected):
    assert plan.choose(names, rows) == expected


def test_runs_go_seed_by_seed_with_mnli_first(rows, out):
    chosen = plan.choose(["roberta-base LoRA"], rows)
    runs = [run for _, run in plan.plan_runs(chosen, rows, None, out)]
    assert [run.seed for run in runs] == [seed for seed in range(5) for _ in range(8)]
    assert [run.recipe for run in runs[::8]] == ["roberta_base_mnli"] * 5
    assert len({run.folder for run in runs}) == 40


def test_seeds(rows, out):
    chosen = plan.choose(["e2e_gpt2_md"], rows)

    def seeds(given):
        return [run.seed for _, run in plan.plan_runs(chosen, rows, given, out)]

    assert seeds(None) == [110, 111, 112, 113, 114]
    assert seeds([7, 3, 7]) == [7, 3]
