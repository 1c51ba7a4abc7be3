"""Loads what write_for_upstream.py wrote in upstream's Transformers and PEFT; compares logits.

The second half of a pair; see the first. Run it where upstream is installed, without this project:

    python tests/interop/check_with_upstream.py OUT

It prints the largest difference of each case. The exit status is 1 if one is above 1e-5, or if
upstream ignores tensors of a file, misses some, or warns about any.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor

import transformers

TOLERANCE = 1e-5
CLASSES = {
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
    "question_answering": transformers.AutoModelForQuestionAnswering,
    "multiple_choice": transformers.AutoModelForMultipleChoice,
    "causal_lm": transformers.AutoModelForCausalLM,
}
COMPLAINTS = ("missing", "unexpected", "mismatch", "newly initialized", "not used")


class Complaints(logging.Handler):
    """Collects what upstream logs or warns about missing and unexpected tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a logged line."""
        self.add(record.getMessage())

    def add(self, message: str) -> None:
        """Keeps a message if it is a complaint."""
        if any(word in message.lower() for word in COMPLAINTS):
            self.found.append(" ".join(message.split())[:160])


def open_whole(case: dict[str, str], folder: Path) -> tuple[torch.nn.Module, list[str]]:
    """The model of a folder, and the tensors that are missing, unexpected or mismatched."""
    model, report = CLASSES[case["head"]].from_pretrained(folder, output_loading_info=True)
    wrong = [f"{what}: {sorted(map(str, some))}" for what, some in report.items() if some]
    return model.eval(), wrong


def open_peft(case: dict[str, str], out: Path) -> tuple[torch.nn.Module, list[str]]:
    """A base with an adapter, and the adapter's tensors that PEFT did not load unchanged."""
    base, wrong = open_whole(case, out / case["base"])
    folder = out / case["folder"]
    model = peft.PeftModel.from_pretrained(base, folder).eval()
    given, taken = load_file(folder / "adapter_model.safetensors"), _taken(model)
    wrong += [f"not taken: {n}" for n in given if n not in taken or not _same(given[n], taken[n])]
    lora = {name for name in taken if "lora_" in name}
    wrong += [f"not given: {name}" for name in sorted(lora - given.keys())]
    return model, wrong


def _taken(model: torch.nn.Module) -> dict[str, Tensor]:
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


def _same(given: Tensor, taken: Tensor) -> bool:
    return given.shape == taken.shape and torch.equal(given, taken)


@contextmanager
def listening() -> Iterator[Complaints]:
    """Collects complaints, and hides all other warnings."""
    complaints = Complaints()
    logger = logging.getLogger("transformers")
    logger.addHandler(complaints)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield complaints
    finally:
        logger.removeHandler(complaints)
    for warning in warned:
        complaints.add(str(warning.message))


def logits_of(model: torch.nn.Module, head: str, ids: Tensor, mask: Tensor) -> Tensor:
    """The batch's logits, zero at padding; for question answering, start and end as columns."""
    if head == "multiple_choice":
        pairs = {"input_ids": ids.unflatten(0, (2, 2)), "attention_mask": mask.unflatten(0, (2, 2))}
        return model(**pairs).logits
    output = model(input_ids=ids, attention_mask=mask)
    if head == "question_answering":
        logits = torch.stack([output.start_logits, output.end_logits], dim=-1)
    else:
        logits = output.logits
    return logits * mask[..., None] if logits.dim() == 3 else logits


@torch.no_grad()
def check(case: dict[str, str], out: Path, tensors: dict[str, Tensor]) -> tuple[float, list[str]]:
    """The largest difference of the logits, and all that is wrong."""
    try:
        with listening() as complaints:
            if case["format"] == "peft":
                model, wrong = open_peft(case, out)
            else:
                model, wrong = open_whole(case, out / case["folder"])
    except Exception as error:  # upstream may raise anything; the other cases are still checked
        return float("nan"), [f"{type(error).__name__}: {error}"]
    logits = logits_of(model, case["head"], tensors["ids"], tensors["mask"])
    difference = (logits - tensors[f"logits/{case['name']}"]).abs().max().item()
    if not difference <= TOLERANCE:
        wrong.append(f"logits differ by {difference:.1e}")
    return difference, wrong + complaints.found


def main(argv: Sequence[str] | None = None) -> None:
    """Checks all cases and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="what write_for_upstream.py wrote")
    out = parser.parse_args(argv).out
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, peft {peft.__version__}")
    tensors = load_file(out / "tensors.safetensors")
    failed = 0
    for case in json.loads((out / "cases.json").read_text()):
        difference, wrong = check(case, out, tensors)
        failed += bool(wrong)
        verdict = "ok" if not wrong else "WRONG"
        print(f"{case['format']:<8}{case['name']:<32}{difference:9.1e}  {verdict}")
        for line in wrong:
            print(f"        {line}")
    print(f"{failed} cases are wrong" if failed else "all cases are as they should be")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
