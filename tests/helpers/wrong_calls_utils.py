"""Wrong calls of the scripts in utils/, and parts of their messages; see test_bad_input.py."""

CONVERT = "utils/convert.py"
SPLIT = "utils/split_lora.py"
REPRODUCE = "utils/reproduce.py"
CALLS = {
    CONVERT: [
        (
            "nowhere.bin out.safetensors",
            "nowhere.bin: no such checkpoint file",
        ),
        (
            "{bad}/damaged.pt out.safetensors",
            "damaged.pt: damaged or not a checkpoint (it is neither safetensors nor a torch file)",
        ),
        (
            "{bad}/gpt2_lora.pt out.safetensors",
            "gpt2_lora.pt: does not record the alpha it was trained with",
        ),
        (
            "{bad}/plain.safetensors out.safetensors --lora_alpha 4",
            "plain.safetensors: none of its 1 tensors is LoRA's ('lora_')",
        ),
        (
            "{good}/lora.safetensors {good}/lora.safetensors",
            "lora.safetensors: exists already; give another name",
        ),
        (
            "{good}/lora.safetensors out.txt",
            "out.txt: cannot tell the format to write from its name: .safetensors is lora, .bin "
            "and .pt are release",
        ),
        (
            "{good}/lora.safetensors out",
            "out: a name without .safetensors (lora), .bin or .pt (release) does not tell the "
            "format to write: give --to, such as --to peft or --to merged for a folder",
        ),
        (
            "{good}/lora.safetensors out --to merged --base {bad}/peft",
            "peft' is an adapter, not a model: give its base ('roberta-base') as the model, and "
            "this as the adapter (give the adapter as IN, and --base roberta-base; if IN was",
        ),
        (
            "{good}/lora.safetensors out --to merged --base {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_string",
            'gpt2_string/config.json: n_head must be a positive integer, not "2"',
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_zero",
            "gpt2_zero/config.json: n_head must be a positive integer, not 0",
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_null",
            "gpt2_null/config.json: n_layer must be a positive integer, not null",
        ),
        (
            "{bad}/gpt2_lora.pt out --to merged --lora_alpha 4 --base {bad}/gpt2_epsilon",
            "gpt2_epsilon/config.json: layer_norm_epsilon must be a number from 0 on, not [1e-05]",
        ),
    ],
    SPLIT: [
        (
            "nowhere out.bin",
            "nowhere: no such checkpoint file",
        ),
        (
            "{bad}/damaged.pt out.bin",
            "damaged.pt: damaged or not a checkpoint (it is neither safetensors nor a torch file)",
        ),
        (
            "{bad}/plain.safetensors out.bin",
            "plain.safetensors: holds no LoRA weights",
        ),
        (
            "{bad}/gpt2_lora.pt out.safetensors",
            "gpt2_lora.pt: has no config.json next to it that states rank and alpha, which "
            "out.safetensors has to record; write a .bin instead",
        ),
    ],
    REPRODUCE: [
        (
            "nothing",
            "there is no recipe or row 'nothing'",
        ),
        (
            "roberta_base_sst2 --small --seeds one",
            "argument --seeds: invalid int value: 'one'",
        ),
        (
            "roberta_base_sst2 --small -- --seed 1",
            "--seed cannot follow --: this program sets it for each run",
        ),
        (
            "roberta_base_sst2 --small --output_dir {bad}/empty",
            "empty: is a file, where a folder is needed",
        ),
    ],
    "utils/ablations.py": [
        (
            "--quickstart_dir nowhere",
            "nowhere/base: no such folder; quickstart.sh makes it: run that first",
        ),
        (
            "--seeds 1 1",
            "--seeds: an interval needs at least two seeds",
        ),
    ],
    "utils/draw_pictures.py": [
        ("photograph", "argument pictures: invalid choice: 'photograph'"),
        ("lora --output_dir nowhere", "nowhere/lora.svg: there is no folder "),
        ("speed --output_dir nowhere", "nowhere/speed.png: there is no folder "),
    ],
    "utils/download_glue_data.py": [
        ("--tasks nothing", "unknown task 'nothing' (known: CoLA, "),
        ("--base_url ftp://nowhere", "'ftp://nowhere' is not an http or https address"),
    ],
}
