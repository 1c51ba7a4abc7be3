"""Wrong calls of the scripts in examples/, and parts of their messages; see test_bad_input.py."""

GLUE = "examples/text-classification/run_glue.py"
MLM = "examples/language-modeling/run_mlm.py"
PREDICT = "examples/text-classification/predict.py"
NER = "examples/token-classification/run_ner.py"
QA = "examples/question-answering/run_qa.py"
SWAG = "examples/multiple-choice/run_swag.py"
LOOP = "examples/plain_pytorch_loop.py"
SMALL_DATA = "examples/make_small_data.py"
SMALL_E2E = "examples/make_small_e2e.py"
RTE = "--task_name rte --data_dir {good}/glue"
OWN = "--apply_lora --lora_r 2 --lora_alpha 4 --train_file {bad}/"
# Script -> the valid arguments before the wrong ones.
COMMON = {
    GLUE: "--model_name_or_path {good}/base --output_dir out --do_train",
    MLM: "--output_dir out --do_train",
    **dict.fromkeys(
        (NER, QA, SWAG), "--model_name_or_path {good}/base --output_dir out --do_train"
    ),
    PREDICT: "--model_name_or_path {good}/base a={good}/lora.safetensors --output_file out.jsonl",
}
CALLS = {
    "examples/quickstart_curves.py": [
        ("nowhere", "nowhere/base: no such folder; quickstart.sh makes it: run that first"),
    ],
    "examples/any_model.py": [
        (
            "--model {good}/base --text {bad}/nowhere.txt --epochs 0",
            "--epochs must be at least 1, not 0",
        ),
        (
            "--model {good}/base --text {bad}/nowhere.txt",
            "this needs upstream's Transformers, but the fork in NLU/",
        ),
    ],
    GLUE: [
        (
            "{rte} --model_name_or_path {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "{rte} --model_name_or_path {bad}/zero_heads",
            "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
        ),
        (
            "{rte} --model_name_or_path {bad}/odd_heads",
            "odd_heads/config.json: hidden_size 8 is not a multiple of 3 heads",
        ),
        (
            "{rte} --model_name_or_path {bad}/float_width",
            "float_width/config.json: hidden_size must be a positive integer, not 8.0",
        ),
        (
            "{rte} --model_name_or_path {bad}/null_vocabulary",
            "null_vocabulary/config.json: vocab_size must be a positive integer, not null",
        ),
        (
            "{rte} --model_name_or_path {bad}/negative_layers",
            "negative_layers/config.json: num_hidden_layers must be a positive integer, not -1",
        ),
        (
            "{rte} --model_name_or_path {bad}/true_types",
            "true_types/config.json: type_vocab_size must be a positive integer, not true",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_activation",
            'list_activation/config.json: hidden_act must be a string, not ["gelu"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/unknown_activation",
            "unknown_activation/config.json: unknown hidden_act 'gelo' (known: gelu, "
            "gelu_new, gelu_fast, linear, mish, relu, sigmoid, silu, swish, tanh)",
        ),
        (
            "{rte} --model_name_or_path {bad}/dropout_of_two",
            "dropout_of_two/config.json: hidden_dropout_prob must lie in [0, 1], not 2",
        ),
        (
            "{rte} --model_name_or_path {bad}/string_epsilon",
            'string_epsilon/config.json: layer_norm_eps must be a number from 0 on, not "1e-5"',
        ),
        (
            "{rte} --model_name_or_path {bad}/null_padding",
            "null_padding/config.json: pad_token_id must be an integer from 0 on, not null",
        ),
        (
            "{rte} --model_name_or_path {bad}/padding_beyond",
            "padding_beyond/config.json: pad_token_id must be below vocab_size, 269, not 9999",
        ),
        (
            "{rte} --model_name_or_path {bad}/id_beyond",
            "the tokenizer has ids up to 269, the model has 269 tokens: they do not belong",
        ),
        (
            "{rte} --model_name_or_path {bad}/no_positions",
            "no_positions/config.json: max_position_embeddings 2 leaves no position for "
            "tokens: the first 2, up to pad_token_id, are reserved",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_labels",
            "list_labels/config.json: id2label must be a map of strings or integers by integer or "
            'null, not ["no", "yes"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/labels_with_gap",
            "labels_with_gap/config.json: id2label must number its classes 0, 1, …; it has 0, 2",
        ),
        (
            "{rte} --model_name_or_path {bad}/list_label_ids",
            "list_label_ids/config.json: label2id must be a map of integers by string or "
            'null, not ["no", "yes"]',
        ),
        (
            "{rte} --model_name_or_path {bad}/list_type",
            "list_type/config.json: model_type must be a string, not ['roberta']",
        ),
        (
            "{rte} --model_name_or_path {bad}/method",
            "method/config.json: there is no setting 'save_pretrained': it is the name of a method",
        ),
        (
            "{rte} --model_name_or_path {bad}/string_rank",
            'string_rank/config.json: lora_r must be a positive integer or null, not "4"',
        ),
        (
            "{own}repeated.csv",
            "repeated.csv: has the column 'label' 2 times; give each column a different name",
        ),
        (
            "{own}shifted.csv",
            "shifted.csv: row 1: has 3 fields, the header names 2 columns",
        ),
        (
            "{own}ids.csv",
            "ids.csv: has 0 text columns (id is named as an identifier, n is of int64)",
        ),
        (
            "{own}three.csv",
            "three.csv: has 3 text columns (a, b, c)",
        ),
        (
            "{own}class.csv",
            "class.csv: all 2 rows have the label '1'; training needs at least two labels",
        ),
        (
            "{own}blank.csv",
            "blank.csv: row 2: has no 'label'",
        ),
        (
            "{own}object.json",
            "object.json: has 0 text columns (text is an object in each row)",
        ),
        (
            "{own}list.json",
            'list.json: row 2: its text is a list, not a text (["a"])',
        ),
        (
            "{own}utf16_train.json",
            "utf16_train.json: is UTF-16 text; save it as UTF-8",
        ),
        (
            "{own}three.csv --text_columns d",
            "three.csv: has no column 'd'; its columns are 'a', 'b', 'c', 'label': --text_columns",
        ),
        (
            "{own}three.csv --text_columns a --label_column gold",
            "three.csv: has no column 'gold'; its columns are 'a', 'b', 'c', 'label': --label_co",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --lora_r -1",
            "--lora_r must be at least 1, not -1",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --lora_dropout 2",
            "--lora_dropout must lie in [0, 1), not 2.0",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --max_seq_length 0",
            "--max_seq_length must be at least 1, not 0",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --masking_prob 3",
            "--masking_prob must lie in [0, 1], not 3.0",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --adam_beta1 2",
            "--adam_beta1 must lie in [0, 1), not 2.0",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --adam_epsilon nan",
            "--adam_epsilon must be a number from 0 on, not nan",
        ),
        (
            "--task_name rte --data_dir {bad}",
            "RTE/train.tsv:1: no column sentence2, label in the header (index, sentence1)",
        ),
        (
            "{rte} --max_seq_length 7",
            "--max_seq_length 7: a pair of texts needs at least 8 tokens, of which 4 are "
            "special ones",
        ),
        (
            "{rte} --max_seq_length 33",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --seed 18446744073709551616",
            "--seed must lie in [0, 4611686018427387904], not 18446744073709551616",
        ),
        (
            "{own}nowhere.csv --model_name_or_path nowhere/base --max_steps 0",
            "--max_steps must be at least 1, not 0: leave it out to train for --num_train_epochs",
        ),
        (
            "{rte} --do_eval --load_best_model_at_end --evaluation_strategy epoch "
            "--metric_for_best_model f1",
            "--metric_for_best_model: no evaluation gives eval_f1; known: loss, accuracy",
        ),
        (
            "{rte} --text_columns a",
            "--text_columns is for files of your own, not for --task_name",
        ),
        (
            "{rte} --train_file mine.csv",
            "--train_file mine.csv would not be read: leave --task_name out, or the file",
        ),
        (
            "{rte} --do_train False --do_eval --apply_lora",
            "apply_lora needs lora_r and lora_alpha: chosen for training, or as the adapter to be "
            "loaded was trained (--lora_r and --lora_alpha, or --lora_path with an adapter)",
        ),
        (
            "{rte} --do_train False --do_eval",
            "there is nothing to evaluate; give --apply_lora --lora_path with an adapter, or a "
            "model that is trained for the task, or --do_train",
        ),
        (
            "{rte} --model_name_or_path {bad}/peft",
            "peft' is an adapter, not a model: give its base ('roberta-base') as the model, and "
            "this as the adapter (--apply_lora --lora_path ",
        ),
    ],
    MLM: [
        (
            "--train_file nowhere",
            "nowhere: no such file",
        ),
        (
            "--train_file {bad}/peft",
            "peft: is a folder; give a file of it",
        ),
        (
            "--train_file {bad}/utf16_corpus.txt",
            "utf16_corpus.txt: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--train_file {bad}/latin",
            "latin:1: not UTF-8 text (invalid continuation byte)",
        ),
        (
            "--train_file {good}/corpus.txt --model_name_or_path {bad}/peft",
            "this script takes no adapters: utils/convert.py ",
        ),
        (
            "--train_file {bad}/empty",
            "empty: holds no text",
        ),
        (
            "--train_file {bad}/mark",
            "mark: holds no text",
        ),
        (
            "--train_file {good}/corpus.txt --max_seq_length 3",
            "--max_seq_length 3: a text needs at least 4 tokens, of which 2 are special ones",
        ),
        (
            "--train_file {good}/corpus.txt --max_seq_length 33 --model_name_or_path {good}/base",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "--train_file {good}/corpus.txt --num_attention_heads 0",
            "num_attention_heads must be a positive integer, not 0",
        ),
        (
            "--train_file {good}/corpus.txt --mlm_probability 2",
            "--mlm_probability must lie in (0, 1], not 2.0",
        ),
        (
            "--train_file {good}/corpus.txt --mlm_probability 0",
            "--mlm_probability must lie in (0, 1], not 0.0",
        ),
        (
            "--train_file {good}/corpus.txt --vocab_size 0",
            "--vocab_size 0: bytes and special tokens alone take 261",
        ),
        (
            "--train_file {good}/corpus.txt --model_name_or_path {bad}/string_heads",
            'string_heads/config.json: num_attention_heads must be a positive integer, not "2"',
        ),
        (
            "--train_file {good}/corpus.txt --do_eval",
            "--do_eval needs --validation_file",
        ),
        (
            "--train_file {good}/corpus.txt --validation_file {good}/corpus.txt --do_eval "
            "--load_best_model_at_end --evaluation_strategy epoch "
            "--metric_for_best_model perplexity",
            "--metric_for_best_model: no evaluation gives eval_perplexity; known: loss",
        ),
        (
            "--train_file {good}/corpus.txt --do_train False",
            "nothing to do: give --do_train or --do_eval",
        ),
        (
            "--train_file {good}/corpus.txt --do_train False --do_predict",
            "nothing to do: give --do_train or --do_eval",
        ),
        (
            "--train_file {good}/corpus.txt --do_train False --do_eval --validation_file "
            "{good}/corpus.txt",
            "there is nothing to evaluate: --do_eval without --do_train needs --model_name_or_path",
        ),
    ],
    PREDICT: [
        (
            "--input_file {bad}/broken.jsonl",
            "broken.jsonl: line 1: is not JSON (Expecting value)",
        ),
        (
            "--input_file {bad}/no_text.jsonl",
            "no_text.jsonl: line 1: has no text",
        ),
        (
            "--input_file {bad}/object.jsonl",
            'object.jsonl: line 1: its text is not a string ({"a": 1})',
        ),
        (
            "--input_file {bad}/gap.jsonl",
            "gap.jsonl: line 2: is blank; only lines at the end may be blank",
        ),
        (
            "--input_file {bad}/answered.jsonl",
            "answered.jsonl: line 1: has the key 'truncated', which the answer needs: give "
            "it another name",
        ),
        (
            "--input_file {bad}/stranger.jsonl",
            'stranger.jsonl: line 1: unknown adapter "x" (expected a)',
        ),
        (
            "--input_file {bad}/list.jsonl",
            "list.jsonl: line 1: is not a JSON object ([1])",
        ),
        (
            "--input_file {bad}/utf16_texts.jsonl",
            "utf16_texts.jsonl: is UTF-16 text; save it as UTF-8",
        ),
        (
            "--input_file {bad}/latin",
            "latin: line 1: is not JSON ('utf-8' codec can't decode byte 0xe9 in position "
            "3: unexpected end of data)",
        ),
        (
            "--input_file nowhere",
            "--input_file nowhere: no such file",
        ),
        (
            "--input_file {good}/texts.jsonl --model_name_or_path nowhere/base --max_seq_length 0",
            "--max_seq_length must be at least 1, not 0",
        ),
        (
            "--input_file {good}/texts.jsonl --model_name_or_path nowhere/base --lora_alpha -1",
            "--lora_alpha must be above 0, not -1",
        ),
        (
            "--input_file {good}/texts.jsonl --max_seq_length 3",
            "--max_seq_length 3: a text needs at least 4 tokens, of which 2 are special ones",
        ),
        (
            "--input_file {good}/texts.jsonl --max_seq_length 33",
            "--max_seq_length 33: the model has 32 positions",
        ),
        (
            "--input_file {good}/texts.jsonl --model_name_or_path {bad}/zero_heads",
            "zero_heads/config.json: num_attention_heads must be a positive integer, not 0",
        ),
        (
            "--input_file {bad}/empty b={good}/base",
            "base: is a model without LoRA, not an adapter (run_glue.py --do_predict takes a model "
            "that was trained whole)",
        ),
        (
            "--input_file {good}/texts.jsonl a={bad}/damaged.pt",
            "two adapters have the name 'a'",
        ),
        (
            "--input_file {good}/texts.jsonl --model_name_or_path {bad}/peft",
            "peft' is an adapter, not a model: give its base ('roberta-base') as the model, and "
            "this as the adapter (NAME=",
        ),
    ],
    NER: [
        (
            "--train_file {bad}/tags.json",
            "tags.json: row 1: has 2 words in tokens, but 1 tags in ner_tags",
        ),
        (
            "--train_file {bad}/one_tag.json",
            "one_tag.json: all words have the tag 'O'; training needs at least two tags",
        ),
        (
            "--train_file {good}/tags.json --validation_file {bad}/unknown_tag.json --do_eval",
            "unknown_tag.json: row 1: tag 2: unknown tag 'B-LOC' (expected B-PER, O)",
        ),
        (
            "--do_train False --do_eval --validation_file {good}/tags.json",
            "base does not name its tags; give --apply_lora --lora_path with an adapter where it "
            "is a base, else the --train_file that it was trained on as well",
        ),
        (
            "--train_file {good}/tags.json --text_column_name words",
            "tags.json: has no column 'words'; its columns are 'tokens', 'ner_tags'; name the "
            "columns with --text_column_name and --label_column_name",
        ),
        (
            "--train_file {bad}/latin",
            "latin: its name must end in .csv, .json or .jsonl",
        ),
        (
            "--train_file {good}/tags.json --max_seq_length 0",
            "--max_seq_length must be at least 1, not 0",
        ),
        (
            "--train_file {good}/tags.json --preprocessing_num_workers 0",
            "--preprocessing_num_workers must be at least 1, not 0",
        ),
        (
            "--dataset_name {good}/nowhere",
            "nowhere",
        ),
        (
            "--train_file {good}/tags.json --apply_lora --lora_r 4",
            "apply_lora needs lora_alpha: chosen for training, or as the adapter to be loaded was "
            "trained (--lora_alpha, or --lora_path with an adapter)",
        ),
    ],
    QA: [
        (
            "--train_file {bad}/span.json",
            "span.json: row 1: its answer 'Ann' at character 6 is outside its context, which has 8 "
            "characters",
        ),
        (
            "--train_file {bad}/unanswered.json",
            "unanswered.json: row 1: has no answer; --version_2_with_negative is for sets with "
            "such questions",
        ),
        (
            "--train_file {bad}/three.csv",
            "three.csv: has no column 'question'; its columns are 'a', 'b', 'c', 'label'",
        ),
        (
            "--train_file {bad}/span.json --max_answer_length 0",
            "--max_answer_length must be at least 1, not 0",
        ),
    ],
    SWAG: [
        (
            "--train_file {bad}/endings.json",
            "endings.json: row 2: its ending2 is empty, but every row has to have 3 endings",
        ),
        (
            "--train_file {bad}/three.csv",
            "three.csv: needs columns ending0, ending1 and so on, at least two; has a, b, c, label",
        ),
        (
            "--output_dir out",
            "give --dataset_name, or --train_file / --validation_file / --test_file",
        ),
    ],
    LOOP: [
        (
            "--r 0",
            "--r must be at least 1, not 0",
        ),
        (
            "--epochs 0",
            "--epochs must be at least 1, not 0",
        ),
        (
            "--output_dir {bad}/empty",
            "empty: is a file, where a folder is needed",
        ),
        (
            "--r two",
            "argument --r: invalid int value: 'two'",
        ),
    ],
    SMALL_DATA: [
        (
            "--output_dir {bad}/empty",
            "empty/SST-2: Not a directory",
        ),
    ],
    SMALL_E2E: [
        (
            "--output_dir {bad}/empty",
            "empty: is a file, where a folder is needed",
        ),
        (
            "--output_dir out --seed x",
            "argument --seed: invalid int value: 'x'",
        ),
    ],
}
