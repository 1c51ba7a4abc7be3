"""Tests the recipes of NLU/ and NLG/: a run's command, and what is read from its folder."""

from pathlib import Path

import pytest
import torch
from fake_runs import finish_glue, finish_nlg, log_of, write_json
from safetensors.torch import save_file

from loralib.adapters.metadata import LoraMetadata
from reproduction.glue import Glue
from reproduction.nlg import Nlg
from reproduction.runs import run_of

ROOT = Path(__file__).resolve().parents[3]

# ---- commands ----


def command_of(tree, recipe: str, seed: int, out: Path) -> tuple[list[str], dict[str, str]]:
    run = run_of(out, recipe, seed)
    problem = tree.obstacle(run)
    assert problem is None, problem
    return tree.command(run)


def value_of(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(
    ("gpus", "nproc", "updates"), [(8, "8", None), (2, "2", "4"), (1, "1", "8")]
)
def test_with_fewer_gpus_accumulation_keeps_the_recipes_batch_size(
    glue, out, monkeypatch, gpus, nproc, updates
):
    monkeypatch.setattr(glue.module, "gpu_count", lambda: gpus)
    words, variables = command_of(glue, "roberta_base_qqp", 1, out)
    assert variables["NPROC"] == nproc
    assert ("--gradient_accumulation_steps" in words) == bool(updates)
    if updates:
        assert value_of(words, "--gradient_accumulation_steps") == updates


def test_the_users_nproc_is_used_as_it_is(glue, out, monkeypatch):
    monkeypatch.setenv("NPROC", "3")
    words, variables = command_of(glue, "roberta_base_qqp", 1, out)
    assert "NPROC" not in variables
    assert "--gradient_accumulation_steps" not in words


def test_an_nlu_recipes_command(glue, out):
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


@pytest.mark.parametrize(("existing", "overwrite"), [("checkpoint-20", "False"), ("runs", "True")])
def test_a_killed_run_resumes_if_it_has_a_checkpoint(glue, out, existing, overwrite):
    run = run_of(out, "roberta_base_sst2", 0)
    (run.output / existing).mkdir(parents=True)
    assert value_of(glue.command(run)[0], "--overwrite_output_dir") == overwrite


def test_an_nlg_recipes_command(nlg, out):
    words, variables = command_of(nlg, "webnlg_gpt2_lg", 112, out)
    assert words == ["bash", str(ROOT / "NLG" / "webnlg_gpt2_lg.sh"), "--resume"]
    folder = str(out / "webnlg_gpt2_lg" / "seed112" / "output")
    assert variables == {"SEED": "112", "RUN_DIR": folder}


def test_rte_starts_from_mnlis_run_of_the_same_seed(glue, out):
    finish_glue(mnli := run_of(out, "roberta_base_mnli", 1), {"accuracy": 0.8}, accuracy_mm=0.8)
    _, variables = command_of(glue, "roberta_base_rte", 1, out)
    assert variables["MNLI_CHECKPOINT"] == str(mnli.output / "pytorch_model_lora.bin")
    problem = glue.obstacle(run_of(out, "roberta_base_rte", 2))
    assert problem.startswith("it starts from the LoRA weights of roberta_base_mnli")


def test_a_run_does_not_start_from_an_unfinished_one(glue, out):
    mnli = run_of(out, "roberta_base_mnli", 1)
    mnli.output.mkdir(parents=True)
    (mnli.output / "pytorch_model_lora.bin").touch()
    assert glue.obstacle(run_of(out, "roberta_base_mrpc", 1)) is not None


@pytest.mark.parametrize("how", ["variable", "release's path"])
def test_other_weights_to_start_from(glue, out, monkeypatch, how):
    finish_glue(run_of(out, "roberta_base_mnli", 1), {"accuracy": 0.8}, accuracy_mm=0.8)
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
    tree = (Nlg if "gpt2" in name else Glue)(out, small=True)
    assert tree.obstacle(run_of(out, name, 0)) == problem


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
    run = run_of(out, f"roberta_base_{task}", 0)
    finish_glue(run, *evaluations, **at_end)
    assert glue.figures(run) == expected


def test_f1_is_that_of_the_best_epoch(glue, out):
    run = run_of(out, "roberta_base_mrpc", 0)
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
    run = run_of(out, recipe, 110)
    finish_nlg(run, **scores)
    assert nlg.figures(run) == expected


def test_skipped_scores_are_left_out(nlg, out):
    run = run_of(out, "e2e_gpt2_md", 110)
    finish_nlg(run, all={"BLEU": 0.5, "NIST": 8.5, "METEOR": None})
    assert nlg.other_scores(run) == {"NIST": 8.5}


def test_the_curve_of_a_killed_glue_run(glue, out):
    run = run_of(out, "roberta_base_rte", 0)
    for step, epochs in ((10, 1), (20, 2)):
        log = log_of(*[{"accuracy": 0.5}, {"accuracy": 0.75}][:epochs])
        write_json(run.output / f"checkpoint-{step}" / "trainer_state.json", log)
    assert glue.curve(run) == ([1, 2], [50.0, 75.0])
    assert glue.figures(run) is None


def test_the_curve_of_a_killed_nlg_run(nlg, out):
    run = run_of(out, "e2e_gpt2_md", 110)
    assert nlg.curve(run) == ([], [])
    run.output.mkdir(parents=True)
    lines = ['{"step": 1, "loss": 3}', '{"step": 2, "valid_loss": 2.5}', '{"step": 4, "valid_l']
    (run.output / "metrics.jsonl").write_text("\n".join(lines))
    assert nlg.curve(run) == ([2], [2.5])


def test_parameters_trained(glue, nlg, out):
    run = run_of(out, "roberta_base_rte", 0)
    assert glue.trained(run) == ""
    run.output.mkdir(parents=True)
    tensors = {
        "roberta.encoder.layer.0.attention.self.query.lora_A": torch.zeros(8, 768),
        "classifier.dense.weight": torch.zeros(768, 2),
    }
    save_file(tensors, run.output / "pytorch_model_lora.safetensors")
    assert glue.trained(run) == "6,144 + 1,536 in the head"

    run = run_of(out, "e2e_gpt2_md", 110)
    assert nlg.trained(run) == ""
    run.output.mkdir(parents=True)
    lora = {"module.transformer.h.0.attn.c_attn.lora_A": torch.zeros(8, 1024)}
    whole = {**lora, "module.transformer.wte.weight": torch.zeros(50, 1024)}
    for name, state in (("model.1000.pt", lora), ("model.2000.pt", whole)):
        torch.save({"model_state_dict": state}, run.output / name)
        assert nlg.trained(run) == "8,192"
    (run.output / "model.1000.pt").unlink()
    assert nlg.trained(run) == "8,192"


@pytest.mark.parametrize("freeze_A", [True, False])
def test_a_frozen_A_and_initial_values_do_not_count_as_trained(glue, nlg, out, freeze_A):
    metadata = LoraMetadata(
        rank=2, alpha=4, targets=("query",), initialization="pissa", freeze_A=freeze_A
    ).to_metadata()
    sizes = {"lora_A": 14, "lora_A_start": 14, "lora_B": 10, "lora_B_start": 10}
    tensors = {
        f"roberta.encoder.layer.0.attention.self.query.{n}": torch.ones(s) for n, s in sizes.items()
    }
    run = run_of(out, "roberta_base_rte", 0)
    run.output.mkdir(parents=True)
    file = run.output / "pytorch_model_lora.safetensors"
    save_file({**tensors, "classifier.dense.weight": torch.zeros(3)}, file, metadata)
    assert glue.trained(run) == f"{10 if freeze_A else 24} + 3 in the head"

    run = run_of(out, "e2e_gpt2_md", 110)
    run.output.mkdir(parents=True)
    state = {f"module.transformer.h.0.attn.c_attn.{n}": torch.ones(s) for n, s in sizes.items()}
    torch.save({"model_state_dict": state, "metadata": metadata}, run.output / "model.1000.pt")
    assert nlg.trained(run) == ("10" if freeze_A else "24")
