"""Makes up folders that runs of recipes leave, for the tests of utils/reproduce.py."""

import json
from pathlib import Path


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
    """Writes what a finished run leaves; it ends with an evaluation of the best epoch's weights."""
    write_json(run.output / "trainer_state.json", log_of(*evaluations))
    first = next(iter(evaluations[0]))
    best = max(evaluations, key=lambda values: values[first])
    ends = {f"eval_{name}": value for name, value in {**best, **at_end}.items()}
    write_json(run.output / "eval_results.json", {"eval_loss": 0.5, **ends})
    run.log.touch()


def finish_nlg(run, **scores: dict[str, float | None]) -> None:
    write_json(run.output / "scores.json", scores)
    run.log.touch()
