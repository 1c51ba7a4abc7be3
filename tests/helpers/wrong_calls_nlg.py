"""Wrong calls of the scripts in NLG/, and parts of their messages; see test_bad_input.py."""

FT = "NLG/src/gpt2_ft.py"
BEAM = "NLG/src/gpt2_beam.py"
ENCODE = "NLG/src/gpt2_encode.py"
DECODE = "NLG/src/gpt2_decode.py"
SCORES = "NLG/eval/measure_scores.py"
# Script -> the valid arguments before the wrong ones.
COMMON = {
    FT: "--platform local --model_card gpt2.xs --work_dir out --lora_dim 2 --seq_len 8 "
    "--valid_data {good}/encoded.jsonl",
    BEAM: "--platform local --model_card gpt2.xs --work_dir out",
    ENCODE: "--output out.jsonl",
    DECODE: "--output_ref_file out_ref --output_pred_file out_pred --vocab {good}/base",
}
CALLS = {
    FT: [
        (
            "--train_data nowhere",
            "nowhere: no such file; create_datasets.sh makes those of E2E, WebNLG and DART",
        ),
        (
            "--train_data {bad}/empty",
            "empty: is empty",
        ),
        (
            "--train_data {bad}/utf16_encoded.jsonl",
            "utf16_encoded.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--train_data {bad}/broken.jsonl",
            "broken.jsonl:1: not JSON (Expecting value: line 1 column 9 (char 8))",
        ),
        (
            "--train_data {bad}/string_ids.jsonl",
            'string_ids.jsonl:1: "context" has to be a list of token ids',
        ),
        (
            "--train_data {bad}/large_ids.jsonl",
            "large_ids.jsonl:1: has token 99999, outside the vocabulary of 50257",
        ),
        (
            "--train_data {good}/encoded.jsonl --init_checkpoint {bad}/damaged.pt",
            "damaged.pt: damaged or not a checkpoint (it is neither safetensors nor a torch file)",
        ),
        (
            "--train_data {good}/encoded.jsonl --init_checkpoint nowhere",
            "nowhere: no such checkpoint file",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dim -1",
            "--lora_dim must be at least 0, not -1",
        ),
        (
            "--train_data {good}/encoded.jsonl --random_seed 18446744073709551616",
            "--random_seed must lie in [0, 4611686018427387904], not 18446744073709551616",
        ),
        (
            "--train_data {good}/encoded.jsonl --seq_len 0",
            "--seq_len must be at least 1, not 0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_alpha 0",
            "--lora_alpha must be above 0, not 0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_targets query key query",
            "lora_targets names query twice",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dim 0 --lora_targets mlp_up",
            "--lora_targets needs LoRA: add --lora_dim",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_plus_ratio 0",
            "--lora_plus_ratio must be above 0, not 0.0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_plus_ratio nan",
            "--lora_plus_ratio must be above 0, not nan",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_rank_pattern mlp_up=8",
            "the pattern 'mlp.c_fc' matches none of the adapted modules: transformer.h.0.attn.c_",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_alpha_pattern mlp_up",
            "--lora_alpha_pattern: 'mlp_up' is not a target, '=' and a number, such as value=4",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dim 999",
            "the rank of transformer.h.0.attn.c_attn, 999, is larger than n_embd, 128",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dropout 2",
            "--lora_dropout must lie in [0, 1), not 2.0",
        ),
        (
            "--train_data {good}/encoded.jsonl --lora_dropout 1",
            "--lora_dropout must lie in [0, 1), not 1.0",
        ),
    ],
    BEAM: [
        (
            "--data {good}/encoded.jsonl",
            "no model given: use --init_checkpoint",
        ),
        (
            "--data {good}/encoded.jsonl --init_checkpoint {bad}/damaged.pt",
            "damaged.pt: damaged or not a checkpoint (it is neither safetensors nor a torch file)",
        ),
        (
            "--data {good}/encoded.jsonl --seq_len 8 --eval_len 8",
            "--seq_len 8 leaves no token for a context next to --eval_len 8",
        ),
        (
            "--data {good}/encoded.jsonl --beam 0",
            "--beam must be at least 1, not 0",
        ),
    ],
    ENCODE: [
        (
            "--input {bad}/context.jsonl --vocab {good}/base",
            'context.jsonl:1: "context" is missing or not a text',
        ),
        (
            "--input {bad}/empty_completion.jsonl --vocab {good}/base",
            "empty_completion.jsonl:1: the completion is empty",
        ),
        (
            "--input {bad}/utf16_formatted.jsonl --vocab {good}/base",
            "utf16_formatted.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input {bad}/list.jsonl --vocab {good}/base",
            "list.jsonl:1: not a JSON object: [1]",
        ),
        (
            "--input nowhere --vocab {good}/base",
            "nowhere: No such file or directory",
        ),
        (
            "--input {good}/formatted.jsonl --vocab {good}/glue",
            "glue: holds no vocabulary (encoder.json with vocab.bpe, or vocab.json with "
            "merges.txt, or tokenizer.json)",
        ),
    ],
    DECODE: [
        (
            "--input_file {good}/formatted.jsonl --sample_file {bad}/one_prediction.jsonl",
            "one_prediction.jsonl: has no prediction of id 1 and 2 others",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {bad}/twice.jsonl",
            "twice.jsonl:2: a second prediction of id 0",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/texts.jsonl",
            'texts.jsonl:1: not a line {"id": number, "predict": [ids]}',
        ),
        (
            "--input_file {bad}/latin --sample_file {good}/predicted.jsonl",
            "latin:1: not UTF-8 (unexpected end of data at byte 3)",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl "
            "--ref_unique_file {bad}/utf16_corpus.txt",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl --ref_num 0",
            "--ref_num 0: must be 1 or more",
        ),
        (
            "--input_file {good}/formatted.jsonl --sample_file {good}/predicted.jsonl "
            "--filter seen",
            'formatted.jsonl:1: --filter seen needs "cate", true or false',
        ),
    ],
    "NLG/src/format_converting_e2e.py": [
        (
            "{bad}/line.txt out",
            "line.txt:1: not of the form meaning representation||text: name : Blue Spice, coffee",
        ),
        (
            "{bad}/utf16_corpus.txt out",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{bad}/empty out",
            "empty:1: not of the form meaning representation||text:",
        ),
    ],
    "NLG/src/format_converting_webnlg.py": [
        (
            "{bad}/object.txt out",
            'object.txt: not WebNLG\'s format, it has no list of "entries"',
        ),
        (
            "{bad}/entry.txt out",
            "entry.txt: entry 1: not in WebNLG's format (KeyError('modifiedtripleset'))",
        ),
        (
            "{bad}/broken.jsonl out",
            "broken.jsonl: not JSON (Expecting value: line 2 column 1 (char 10))",
        ),
    ],
    "NLG/src/format_converting_dart.py": [
        (
            "{bad}/object.txt out",
            "object.txt: not DART's format, it is not a list",
        ),
        (
            "{bad}/triple.txt out",
            "triple.txt: entry 1: a triple does not have three parts",
        ),
        (
            "{bad}/utf16_train.json out",
            "utf16_train.json: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{bad}/latin out",
            "latin: not JSON ('utf-8' codec can't decode byte 0xe9 in position 3: invalid "
            "continuation byte)",
        ),
    ],
    SCORES: [
        (
            "{good}/references",
            "give either REFERENCES PREDICTIONS, or -R PREFIX -H PREDICTIONS",
        ),
        (
            "{good}/references {bad}/three_lines",
            "three_lines: 3 predictions for 1 rows of references",
        ),
        (
            "{bad}/blank_lines {good}/predictions",
            "blank_lines: holds no references",
        ),
        (
            "{good}/references {bad}/latin",
            "latin: not text in UTF-8 (invalid continuation byte)",
        ),
        (
            "{bad}/utf16_corpus.txt {good}/predictions",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{good}/references {good}/predictions -m meter",
            "no metric 'meter' for these arguments; known: bleu, nist, meteor, rouge_l, cider",
        ),
        (
            "-R {good}/ref -H {good}/predictions -nr 2",
            "no such file: ref0, ref1 (with -nr 2)",
        ),
        (
            "{good}/references nowhere",
            "nowhere: No such file or directory",
        ),
    ],
}
