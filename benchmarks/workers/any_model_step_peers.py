"""Times a LoRA step of upstream's models under PEFT, in the peers' environment."""

import any_model
from any_model import make_batch
from peft import LoraConfig, get_peft_model
from timing import Step, run
from upstream import versions


def make_step(plan: dict) -> Step:
    """Returns the step that the plan asks for, with PEFT's default adapters' dtype and head."""
    settings = LoraConfig(
        r=plan["rank"],
        lora_alpha=plan["alpha"],
        lora_dropout=plan["lora_dropout"],
        target_modules=plan["targets"],
        use_dora=plan["variant"] == "dora",
        modules_to_save=plan["modules_to_train"],
    )
    return any_model.make_step(plan, get_peft_model(any_model.build(plan), settings))


if __name__ == "__main__":
    run(make_step, make_batch, versions())
