"""Times a LoRA step of upstream's models under `loralib.add_lora`, in the peers' environment."""

import any_model
from any_model import make_batch
from timing import Step, run
from upstream import versions

import loralib as lora


def make_step(plan: dict) -> Step:
    """Returns the step that the plan asks for."""
    model = any_model.build(plan)
    lora.add_lora(
        model,
        plan["targets"],
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        lora_dropout=plan["lora_dropout"],
        variant=plan["variant"],
        modules_to_train=plan["modules_to_train"],
    )
    return any_model.make_step(plan, model)


if __name__ == "__main__":
    run(make_step, make_batch, {"loralib": lora.__version__, **versions()})
