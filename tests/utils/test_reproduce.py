"""utils/reproduce.py: on made-up run folders, with made-up programs, and a trial of both trees."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "utils" / "reproduce.py"
FACTS = ROOT.parent / "shared" / "facts"


def load_reproduce():
    name = "utils_tests_reproduce"
    spec = importlib.util.spec_from_file_location(name, SCRIPT)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reproduce = load_reproduce()


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No variable of the caller's, and a folder to work in."""
    for name in ("NPROC", "MNLI_CHECKPOINT", "MASTER_PORT", "SEED", "RUN_DIR", "TRIAL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def glue(out):
    return reproduce.Glue(out, small=False)


@pytest.fixture
def nlg(out):
    return reproduce.Nlg(out, small=False)


@pytest.fixture
def rows(glue, nlg):
    return reproduce.read_rows([glue, nlg])


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def log_of(*evaluations: dict[str, float]) -> dict[str, list]:
    """A Trainer's state; a loss is logged in each epoch, too."""
    history = []
    for epoch, values in enumerate(evaluations, start=1):
        named = {f"eval_{name}": value for name, value in values.items()}
        history.append({"loss": 0.7, "epoch": epoch, "step": 10 * epoch})
        history.append({"eval_loss": 0.5, **named, "epoch": epoch, "step": 10 * epoch})
    return {"log_history": history}


def finish_glue(run, *evaluations: dict[str, float], **at_end: float) -> None:
    """What a finished run leaves; at the end, the best epoch's weights are evaluated again."""
    write_json(run.output / "trainer_state.json", log_of(*evaluations))
    first = next(iter(evaluations[0]))
    best = max(evaluations, key=lambda values: values[first])
    ends = {f"eval_{name}": value for name, value in {**best, **at_end}.items()}
    write_json(run.output / "eval_results.json", {"eval_loss": 0.5, **ends})
    run.log.touch()


def finish_nlg(run, **scores: dict[str, float | None]) -> None:
    write_json(run.output / "scores.json", scores)
    run.log.touch()


def cells(row, out, asked=()):
    return reproduce.cells_of(row, out, list(asked))


# ---- what there is to run ----


def test_the_paper_s_figures():
    path = FACTS / "paper_results.json"
    if not path.is_file():
        pytest.skip("the paper's figures are not on this machine")
    known, ours = json.loads(path.read_text()), json.loads(reproduce.PAPER.read_text())
    for section in ("glue_dev", "nlg_test"):
        figures = {name: row for name, row in known[section].items() if isinstance(row, dict)}
        assert ours[section] == figures


def test_every_lora_row_of_the_paper_has_its_recipes(rows):
    paper = json.loads(reproduce.PAPER.read_text())
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
    assert reproduce.choose(names, rows) == expected


@pytest.mark.parametrize("name", ["roberta_base_xyz", "roberta-base fine-tune", "gpt2-md adapter"])
def test_a_wrong_name(name, capsys):
    with pytest.raises(ValueError, match=f"there is no recipe or row '{name}'") as caught:
        reproduce.main(["roberta_base_rte", name])
    message = str(caught.value)
    assert "\n" not in message
    for known in ("roberta-base LoRA", "gpt2-md LoRA", "roberta_base_rte", "e2e_gpt2_lg"):
        assert known in message
    assert not Path("output").exists()


def test_a_seed_after_the_other_and_mnli_first(rows, out):
    chosen = reproduce.choose(["roberta-base LoRA"], rows)
    runs = [run for _, run in reproduce.plan(chosen, rows, None, out)]
    assert [run.seed for run in runs] == [seed for seed in range(5) for _ in range(8)]
    assert [run.recipe for run in runs[::8]] == ["roberta_base_mnli"] * 5
    assert len({run.folder for run in runs}) == 40


def test_seeds(rows, out):
    chosen = reproduce.choose(["e2e_gpt2_md"], rows)

    def seeds(given):
        return [run.seed for _, run in reproduce.plan(chosen, rows, given, out)]

    assert seeds(None) == [110, 111, 112, 113, 114]
    assert seeds([7, 3, 7]) == [7, 3]


# ---- commands ----


def command_of(tree, recipe: str, seed: int, out: Path) -> tuple[list[str], dict[str, str]]:
    run = reproduce.run_of(out, recipe, seed)
    problem = tree.obstacle(run)
    assert problem is None, problem
    return tree.command(run)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("gpus", "nproc", "updates"), [(8, "8", None), (2, "2", "4"), (1, "1", "8")]
)
def test_batches_stay_the_recipe_s(glue, out, monkeypatch, gpus, nproc, updates):
    monkeypatch.setattr(glue.module, "gpu_count", lambda: gpus)
    words, variables = command_of(glue, "roberta_base_qqp", 1, out)
    assert variables["NPROC"] == nproc
    assert ("--gradient_accumulation_steps" in words) == bool(updates)
    if updates:
        assert value_of(words, "--gradient_accumulation_steps") == updates


def test_the_user_s_nproc_counts(glue, out, monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    words, variables = command_of(glue, "roberta_base_qqp", 1, out)
    assert "NPROC" not in variables
    assert "--gradient_accumulation_steps" not in words


def test_a_recipe_s_command(glue, out):
    words, _ = command_of(glue, "deberta_v2_xxlarge_cola", 4, out)
    assert words[:2] == ["bash", str(ROOT / "NLU" / "deberta_v2_xxlarge_cola.sh")]
    assert value_of(words, "--seed") == "4"
    assert value_of(words, "--output_dir").endswith("deberta_v2_xxlarge_cola/seed4/output")
    assert value_of(words, "--metric_for_best_model") == "matthews_correlation"
    assert value_of(words, "--overwrite_output_dir") == "True"
    assert "--save_lora_only" in words


def test_without_lora_the_whole_model_is_saved(glue, out):
    words, _ = command_of(glue, "adapter_houlsby_roberta_large_mnli", 0, out)
    assert "--save_lora_only" not in words


@pytest.mark.parametrize(("left", "overwrite"), [("checkpoint-20", "False"), ("runs", "True")])
def test_what_a_killed_run_has_left(glue, out, left, overwrite):
    run = reproduce.run_of(out, "roberta_base_sst2", 0)
    (run.output / left).mkdir(parents=True)
    assert value_of(glue.command(run)[0], "--overwrite_output_dir") == overwrite


def test_an_nlg_recipe_s_command(nlg, out):
    words, variables = command_of(nlg, "webnlg_gpt2_lg", 112, out)
    assert words == ["bash", str(ROOT / "NLG" / "webnlg_gpt2_lg.sh"), "--resume"]
    folder = str(out / "webnlg_gpt2_lg" / "seed112" / "output")
    assert variables == {"SEED": "112", "RUN_DIR": folder}


def test_rte_starts_from_mnli_s_run_of_the_same_seed(glue, out):
    finish_glue(
        mnli := reproduce.run_of(out, "roberta_base_mnli", 1), {"accuracy": 0.8}, accuracy_mm=0.8
    )
    _, variables = command_of(glue, "roberta_base_rte", 1, out)
    assert variables["MNLI_CHECKPOINT"] == str(mnli.output / "pytorch_model_lora.bin")
    problem = glue.obstacle(reproduce.run_of(out, "roberta_base_rte", 2))
    assert problem.startswith("it starts from what roberta_base_mnli learns")


def test_an_unfinished_mnli_is_nothing_to_start_from(glue, out):
    mnli = reproduce.run_of(out, "roberta_base_mnli", 1)
    mnli.output.mkdir(parents=True)
    (mnli.output / "pytorch_model_lora.bin").touch()
    assert glue.obstacle(reproduce.run_of(out, "roberta_base_mrpc", 1)) is not None


@pytest.mark.parametrize("how", ["variable", "release's path"])
def test_other_weights_to_start_from(glue, out, monkeypatch, how):
    finish_glue(reproduce.run_of(out, "roberta_base_mnli", 1), {"accuracy": 0.8}, accuracy_mm=0.8)
    if how == "variable":
        monkeypatch.setenv("MNLI_CHECKPOINT", "elsewhere.bin")
    else:
        Path("roberta_base_mnli_lora.bin").touch()
    seed = 1 if how == "variable" else 2
    _, variables = command_of(glue, "roberta_base_stsb", seed, out)
    assert "MNLI_CHECKPOINT" not in variables


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("roberta_base_sst2", None),
        ("roberta_large_sst2", None),
        ("roberta_base_mnli", "the small data has SST-2 only"),
        ("deberta_v2_xxlarge_sst2", "the small base is a RoBERTa"),
        ("e2e_gpt2_lg", None),
        ("dart_gpt2_md", "the small data is in E2E's format only"),
    ],
)
def test_what_a_trial_can_run(out, name, problem):
    tree = (reproduce.Nlg if "gpt2" in name else reproduce.Glue)(out, small=True)
    assert tree.obstacle(reproduce.run_of(out, name, 0)) == problem


# ---- a run's figures ----


@pytest.mark.parametrize(
    ("task", "evaluations", "at_end", "expected"),
    [
        ("rte", [{"accuracy": a} for a in (0.5, 0.875, 0.75)], {}, (87.5,)),
        (
            "stsb",
            [{"pearson": 0.75, "spearmanr": 0.9}, {"pearson": 0.875, "spearmanr": 0.5}],
            {},
            (87.5, 50.0),
        ),
        (
            "cola",
            [{"matthews_correlation": m} for m in (-0.25, -0.125)],
            {},
            (-12.5,),
        ),
        (
            "mnli",
            [{"accuracy": 0.5}, {"accuracy": 0.75}, {"accuracy": 0.625}],
            {"accuracy_mm": 0.625},
            (75.0, 62.5),
        ),
    ],
)
def test_the_best_epoch_counts(glue, out, task, evaluations, at_end, expected):
    run = reproduce.run_of(out, f"roberta_base_{task}", 0)
    finish_glue(run, *evaluations, **at_end)
    assert glue.figures(run) == expected


def test_f1_is_the_best_epoch_s(glue, out):
    run = reproduce.run_of(out, "roberta_base_mrpc", 0)
    finish_glue(run, {"accuracy": 0.75, "f1": 0.5}, {"accuracy": 0.5, "f1": 0.75})
    assert glue.other_scores(run) == {"F1": 50.0}


@pytest.mark.parametrize(
    ("recipe", "scores", "expected"),
    [
        ("e2e_gpt2_md", {"all": {"BLEU": 0.75}}, (75.0,)),
        ("dart_gpt2_md", {"all": {"BLEU": 47.5}}, (47.5,)),
        (
            "webnlg_gpt2_md",
            {"all": {"BLEU": 55.0}, "seen": {"BLEU": 62.0}, "unseen": {"BLEU": 46.0}},
            (46.0, 62.0, 55.0),
        ),
        ("webnlg_gpt2_md", {"all": {"BLEU": 55.0}, "seen": {"BLEU": 62.0}}, None),
        ("e2e_gpt2_md", {}, None),
    ],
)
def test_bleu(nlg, out, recipe, scores, expected):
    run = reproduce.run_of(out, recipe, 110)
    finish_nlg(run, **scores)
    assert nlg.figures(run) == expected


def test_skipped_scores_are_left_out(nlg, out):
    run = reproduce.run_of(out, "e2e_gpt2_md", 110)
    finish_nlg(run, all={"BLEU": 0.5, "NIST": 8.5, "METEOR": None})
    assert nlg.other_scores(run) == {"NIST": 8.5}


def test_the_curve_of_a_killed_glue_run(glue, out):
    run = reproduce.run_of(out, "roberta_base_rte", 0)
    for step, epochs in ((10, 1), (20, 2)):
        log = log_of(*[{"accuracy": 0.5}, {"accuracy": 0.75}][:epochs])
        write_json(run.output / f"checkpoint-{step}" / "trainer_state.json", log)
    assert glue.curve(run) == ([1, 2], [50.0, 75.0])
    assert glue.figures(run) is None


def test_the_curve_of_a_killed_nlg_run(nlg, out):
    run = reproduce.run_of(out, "e2e_gpt2_md", 110)
    assert nlg.curve(run) == ([], [])
    run.output.mkdir(parents=True)
    lines = ['{"step": 1, "loss": 3}', '{"step": 2, "valid_loss": 2.5}', '{"step": 4, "valid_l']
    (run.output / "metrics.jsonl").write_text("\n".join(lines))
    assert nlg.curve(run) == ([2], [2.5])


def test_parameters_trained(glue, nlg, out):
    run = reproduce.run_of(out, "roberta_base_rte", 0)
    assert glue.trained(run) == ""
    run.output.mkdir(parents=True)
    tensors = {
        "roberta.encoder.layer.0.attention.self.query.lora_A": torch.zeros(8, 768),
        "classifier.dense.weight": torch.zeros(768, 2),
    }
    save_file(tensors, run.output / "pytorch_model_lora.safetensors")
    assert glue.trained(run) == "6,144 + 1,536 in the head"

    run = reproduce.run_of(out, "e2e_gpt2_md", 110)
    assert nlg.trained(run) == ""
    run.output.mkdir(parents=True)
    lora = {"module.transformer.h.0.attn.c_attn.lora_A": torch.zeros(8, 1024)}
    whole = {**lora, "module.transformer.wte.weight": torch.zeros(50, 1024)}
    for name, state in (("model.1000.pt", lora), ("model.2000.pt", whole)):
        torch.save({"model_state_dict": state}, run.output / name)
        assert nlg.trained(run) == "8,192"
    (run.output / "model.1000.pt").unlink()
    assert nlg.trained(run) == "8,192"


# ---- running ----

FINISHES = """mkdir -p {output} && echo '{{"all": {{"BLEU": 0.5}}}}' > {output}/scores.json"""


@pytest.fixture
def program(nlg, monkeypatch):
    """Makes a shell script take the place of the recipes."""

    def set_to(text: str) -> None:
        def command(run):
            return ["bash", "-c", text.format(output=run.output), "bash"], {"SEED": str(run.seed)}

        monkeypatch.setattr(nlg, "command", command)

    return set_to


@pytest.fixture
def run(out):
    return reproduce.run_of(out, "e2e_gpt2_md", 110)


def test_a_run(nlg, run, program):
    program(FINISHES + "; echo seed $SEED, port $MASTER_PORT, $(which python), flags $*")
    run.folder.mkdir(parents=True)
    run.error.write_text("of an earlier attempt")
    reproduce.carry_out(nlg, run, ["--bf16", "a b"])
    assert nlg.figures(run) == (50.0,)
    assert reproduce.problem_of(nlg, run) is None
    assert not run.error.exists()
    said = run.log.read_text()
    assert said.startswith("seed 110, port ")
    assert said.endswith(f"{Path(sys.executable).parent / 'python'}, flags --bf16 a b\n")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "echo 'gpt2_ft.py: error: no base'; echo 'a.b.ChildFailedError: '; echo ====; exit 1",
            "gpt2_ft.py: error: no base",
        ),
        ("echo '  some last words'; echo '----'; exit 3", "some last words"),
        ("exit 1", "it printed nothing"),
        ("kill -KILL $$", "killed by SIGKILL"),
        ("echo done", "done"),
    ],
    ids=["error", "words", "silent", "killed", "no results"],
)
def test_a_run_that_fails(nlg, run, program, text, error):
    program("echo 'x.py: error: an earlier one'; exit 1")
    reproduce.carry_out(nlg, run, [])
    program(text)
    reproduce.carry_out(nlg, run, [])
    assert reproduce.problem_of(nlg, run) == f"failed: {error}"
    program(FINISHES)
    reproduce.carry_out(nlg, run, [])
    assert reproduce.problem_of(nlg, run) is None


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("Traceback:\n[rank0]: KeyError: 'x'\nW1 elastic: Sending\n", "[rank0]: KeyError: 'x'"),
        (
            "torch.OutOfMemoryError: CUDA\nx.errors.ChildFailedError: \n",
            "torch.OutOfMemoryError: CUDA",
        ),
        ("roberta_base_rte.sh: error: no file\n", "roberta_base_rte.sh: error: no file"),
        (
            "50%|#\r60%|##\rrun_glue.py: error (process 1): two\nend\n",
            "run_glue.py: error (process 1): two",
        ),
        ("Some Errors: none\nlast\n", "last"),
        ("\n====\n", None),
    ],
)
def test_the_line_that_says_what_went_wrong(log, line):
    assert reproduce.last_error(log) == line


def test_what_is_interrupted_is_ended_and_unfinished(nlg, run, program, tmp_path):
    program(f"echo $$ > {tmp_path / 'pid'}; sleep 0.3; kill -INT $PPID; sleep 60")
    # What a shell starts in the background does not hear it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            reproduce.carry_out(nlg, run, [])
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert reproduce.problem_of(nlg, run).startswith("unfinished")


def test_what_a_run_leaves_behind_keeps_its_folder(nlg, run, program, tmp_path):
    program(f"sleep 60 & echo $! > {tmp_path / 'pid'}; exit 1")
    reproduce.carry_out(nlg, run, [])
    with pytest.raises(ValueError, match="another program is at work there"):
        reproduce.carry_out(nlg, run, [])
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    program("echo again; exit 1")
    for _ in range(50):
        try:
            reproduce.carry_out(nlg, run, [])
            break
        except ValueError:  # it is still ending
            time.sleep(0.05)
    assert run.log.read_text() == "again\n"


@pytest.fixture
def called(monkeypatch):
    """Recipes are not run, but noted, and fail."""
    runs = []

    def carry_out(tree, run, flags):
        runs.append((str(run), list(flags)))
        run.folder.mkdir(parents=True, exist_ok=True)
        run.log.touch()
        run.error.write_text("x.py: error: no GPU\n")

    monkeypatch.setattr(reproduce, "carry_out", carry_out)
    return runs


def test_finished_runs_are_not_run_again(called, out, capsys):
    finish_glue(reproduce.run_of(out, "roberta_base_qqp", 1), {"accuracy": 0.75, "f1": 0.5})
    arguments = ["roberta_base_qqp", "--output_dir", str(out), "--seeds", "0", "1", "2"]
    for _ in range(2):
        called.clear()
        with pytest.raises(RuntimeError, match=r"2 of 3 runs are not finished: see .*results\.md"):
            reproduce.main([*arguments, "--", "--bf16"])
        assert called == [(f"roberta_base_qqp, seed {seed}", ["--bf16"]) for seed in (0, 2)]
    printed = capsys.readouterr().out
    assert (out / "results.md").read_text() in printed
    assert "| QQP | accuracy | 90.8±.1 | 75.0 | 1 of 3 | 1: 75.0 |" in printed
    assert "- QQP: seed 0: failed: x.py: error: no GPU\n" in printed
    assert "behind the recipes' own: `--bf16`" in printed


def test_a_run_without_its_start_is_not_run(called, out, capsys):
    with pytest.raises(RuntimeError, match="1 of 1 runs are not finished"):
        reproduce.main(["roberta_base_rte", "--output_dir", str(out), "--seeds", "4"])
    assert called == []
    assert (
        "- MRPC, RTE, STS-B: not run (it starts from what roberta_base_mnli learns"
        in capsys.readouterr().out
    )


def test_all_runs_of_a_folder_are_made_in_one_way(called, out, monkeypatch):
    def ask(*more: str) -> None:
        reproduce.main(["e2e_gpt2_md", "--seeds", "1", "--output_dir", str(out), *more])

    for _ in range(2):
        with pytest.raises(RuntimeError):
            ask("--", "--bf16")
    with pytest.raises(ValueError, match=r"runs made with --bf16, not with no flags: ask for the"):
        ask()
    with pytest.raises(ValueError, match="not with --small and --bf16"):
        ask("--small", "--", "--bf16")
    monkeypatch.setenv("NPROC", "1")
    with pytest.raises(ValueError, match="with --bf16, not with NPROC=1 and --bf16"):
        ask("--", "--bf16")
    assert len(called) == 2


@pytest.mark.parametrize("flag", ["--seed", "--seed=7", "--output_d", "--metric_for_best_model"])
def test_a_flag_that_the_figures_depend_on(called, out, flag):
    with pytest.raises(ValueError, match=f"{flag.split('=')[0]} behind --: this program gives"):
        reproduce.main(["roberta_base_qqp", "--output_dir", str(out), "--", flag, "7"])
    assert not called
    assert not out.exists()


# ---- the table and the picture ----


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([86.64], "86.6"),
        ([1.0, 2.0], "1.5±6.4"),  # 12.706 · 0.7071 / √2
        ([86.0, 86.0, 86.0], "86.0±0.0"),
        ([84.0, 85.0, 90.0, 86.0, 87.0], "86.0±2.9"),  # 2.776 · 2.3022 / √5
    ],
)
def test_median_and_interval(values, expected):
    assert reproduce.with_interval(values) == expected


def test_a_cell_of_every_kind(rows, out, glue):
    """A finished run among failed and cut off ones, and cells without any figure."""
    for seed, accuracy in ((0, 0.75), (1, 0.5)):
        run = reproduce.run_of(out, "roberta_base_sst2", seed)
        finish_glue(run, {"accuracy": accuracy}, {"accuracy": 0.25})
    failed = [
        reproduce.run_of(out, "roberta_base_sst2", 2),
        reproduce.run_of(out, "roberta_base_cola", 0),
    ]
    for run in failed:
        run.folder.mkdir(parents=True)
        run.log.touch()
        run.error.write_text("run_glue.py: error: it is full\n")
    cut_off = [
        reproduce.run_of(out, "roberta_base_sst2", 3),
        reproduce.run_of(out, "roberta_base_qnli", 0),
    ]
    for run in cut_off:
        run.folder.mkdir(parents=True)
        run.log.touch()
    asked = [reproduce.run_of(out, "roberta_base_sst2", seed) for seed in range(5)]
    row = rows["roberta-base LoRA"]
    lines = reproduce.report_row(row, cells(row, out, asked))
    starts = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:5] for line in lines}
    assert starts["SST-2"] == ["95.1±.2", "62.5±158.8", "2 of 5"]
    assert starts["CoLA"][1] == "failed"
    assert starts["QNLI"][1] == "unfinished"
    assert starts["QQP"][1] == "not run"
    assert starts["average"][:2] == ["87.2", "not all run"]
    for note in (
        "- SST-2: seed 2: failed: run_glue.py: error: it is full",
        "- SST-2: seed 3: unfinished, the same command goes on with it",
        "- SST-2: seed 4: not run",
        "- CoLA: failed: run_glue.py: error: it is full",
        "- MNLI, QQP: not run",
        "- parameters trained, in the paper: 0.3M",
    ):
        assert note in lines


@pytest.mark.parametrize(
    ("kinds", "word"),
    [("nun", "unfinished"), ("unf", "failed"), ("nn", "not run")],
)
def test_the_worst_of_a_cell_is_said(rows, out, kinds, word):
    runs = [reproduce.run_of(out, "roberta_base_qqp", seed) for seed in range(len(kinds))]
    for run, kind in zip(runs, kinds, strict=True):
        run.folder.mkdir(parents=True)
        if kind in "uf":
            run.log.touch()
        if kind == "f":
            run.error.write_text("x.py: error: y\n")
    assert cells(rows["roberta-base LoRA"], out, runs)["qqp"].result == word


def test_a_whole_row(rows, out):
    """The average is of the first figures, as the paper's is."""
    values = dict(
        zip(
            ("mnli", "sst2", "mrpc", "cola", "qnli", "qqp", "rte", "stsb"),
            range(80, 88),
            strict=True,
        )
    )
    for task, value in values.items():
        first = {"cola": "matthews_correlation", "stsb": "pearson"}.get(task, "accuracy")
        for seed in range(3):
            run = reproduce.run_of(out, f"roberta_base_{task}", seed)
            score = (value + seed - 1) / 100
            more = {"stsb": {"spearmanr": 0.5}}.get(task, {})
            finish_glue(
                run, {first: score, **more}, **({"accuracy_mm": 0.25} if task == "mnli" else {})
            )
    row = rows["roberta-base LoRA"]
    text = "\n".join(reproduce.report_row(row, cells(row, out)))
    # 4.303 · 1 / √3
    assert (
        "| MNLI | matched/mismatched accuracy | 87.5±.3/86.9±.3 | 80.0±2.5/25.0±0.0 | 3 of 3 |"
        in text
    )
    assert "0: 79.0/25.0, 1: 80.0/25.0, 2: 81.0/25.0" in text
    assert "| STS-B | Pearson/Spearman correlation | 91.5±.2/91.3±.2 | 87.0±2.5/50.0±0.0 |" in text
    assert "| average | of the first figures | 87.2 | 83.5 |" in text
    assert "not run" not in text


def test_the_other_scores(rows, out):
    for seed, nist, meteor in ((110, 8.5, 0.46), (111, 8.75, None), (112, 8.9, 0.46)):
        scores = {"BLEU": 0.7, "NIST": nist, "METEOR": meteor}
        finish_nlg(reproduce.run_of(out, "e2e_gpt2_md", seed), all=scores)
    row = rows["gpt2-md LoRA"]
    assert "- E2E, medians of the other scores: NIST 8.75" in reproduce.report_row(
        row, cells(row, out)
    )


def test_rows_of_which_nothing_is_there_are_left_out(rows, out):
    finish_nlg(reproduce.run_of(out, "e2e_gpt2_md", 110), all={"BLEU": 0.7})
    asked = [reproduce.run_of(out, "roberta_large_cola", 0)]
    text = reproduce.write_report(out, list(rows.values()), asked, {"small": False, "flags": []})
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## roberta-large LoRA: GLUE, development sets",
        "## gpt2-md LoRA: GPT-2, test sets",
    ]
    assert "trial" not in text


def test_the_learning_curves(glue, nlg, out):
    runs = [reproduce.run_of(out, "roberta_base_rte", seed) for seed in (0, 1)]
    finish_glue(runs[0], {"accuracy": 0.5}, {"accuracy": 0.75})
    failed = reproduce.run_of(out, "e2e_gpt2_md", 110)
    figure = reproduce.draw({"roberta_base_rte": (glue, runs), "e2e_gpt2_md": (nlg, [failed])})
    first, second = figure.axes
    assert first.get_title() == "roberta_base_rte"
    assert first.axison
    assert [line.get_label() for line in first.lines] == ["seed 0", "seed 1"]
    assert first.lines[0].get_xydata().tolist() == [[1, 50], [2, 75]]
    assert (first.get_xlabel(), first.get_ylabel()) == ("epoch", "accuracy, %")
    assert (second.get_xlabel(), second.get_ylabel()) == ("step", "validation loss")


# ---- all of it ----


def start(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_a_trial_of_a_glue_row_and_of_e2e(out, called, capsys):
    asked = [
        "roberta-base LoRA",
        "e2e_gpt2_md",
        "--small",
        "--seeds",
        "7",
        "--output_dir",
        str(out),
    ]
    result = start(*asked)
    assert result.returncode == 0, result.stderr + "".join(
        p.read_text() for p in out.glob("*/*/*.txt")
    )
    text = (out / "results.md").read_text()
    assert result.stdout == text + "\n"
    assert "**A trial**" in text
    row = next(line for line in text.splitlines() if line.startswith("| SST-2 "))
    _, _, paper, here, counts, each, trained = row.strip("| ").split(" | ")
    assert (paper, counts, each) == ("95.1±.2", "1 of 1", f"7: {here}")
    assert 0 < float(here) <= 100
    # Two layers of width 32 with rank 8 on two projections; a head of two classes.
    assert trained == f"{2 * 2 * 2 * 8 * 32:,} + {32 * 32 + 32 + 2 * 32 + 2:,} in the head"
    row = next(line for line in text.splitlines() if line.startswith("| E2E "))
    assert re.search(rf"\| 1 of 1 \| 7: \d+\.\d \| {4 * 2 * 2 * 4 * 128:,} \|$", row)
    assert "- MNLI, MRPC, CoLA, QNLI, QQP, RTE, STS-B: not run (the small data has" in text
    assert "- DART, WebNLG: not run" in text
    with Image.open(out / "learning_curves.png") as picture:
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10

    reproduce.main(asked)
    assert called == []
    assert capsys.readouterr().out == result.stdout


def test_an_error_is_one_line():
    result = start("no_such_recipe")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith(
        "reproduce.py: error: there is no recipe or row 'no_such_recipe'"
    )


def test_told_to_end_it_ends_with_its_table(out, tmp_path):
    """Its run is told, too, and is unfinished."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import reproduce\n"
        "reproduce.Nlg.command = lambda self, run: (['bash', '-c', 'echo on; sleep 60'], {})\n"
        "reproduce.start()"
    )
    arguments = [SCRIPT.parent, "e2e_gpt2_md", "--seeds", "1", "--output_dir", out]
    program = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    log = reproduce.run_of(out, "e2e_gpt2_md", 1).log
    while not (log.is_file() and log.read_text() == "on\n"):
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    printed, _ = program.communicate(timeout=30)
    assert program.returncode == 143
    assert "- E2E: unfinished, the same command goes on with it" in printed
    with reproduce.held(reproduce.run_of(out, "e2e_gpt2_md", 1)):
        pass
