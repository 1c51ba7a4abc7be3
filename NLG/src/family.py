"""GPT-2: what adapters need to know of it."""

from loralib.adapters.families import Family, register

GPT2 = register(
    Family(
        name="gpt2",
        title="GPT-2",
        backbone="transformer.",
        layers="transformer.h.",
        lora_modules=("attn.c_attn",),
        # Query, key and value: LoRA is in the first and the last.
        stacked={"attn.c_attn": (True, False, True)},
        tied=dict.fromkeys(("lm_head.weight", "lm_head.decoder.weight"), "transformer.wte.weight"),
        old_names={r"^h\.": "transformer.h."},
        wrapped_in_release=True,
        fan_in_fan_out=True,
        peft_task="CAUSAL_LM",
        tokenizer_files=("vocab.json", "merges.txt"),
    )
)
