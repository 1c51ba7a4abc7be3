"""Settings of small encoders, and the number of terms in their sums."""

# The terms of successive sums in the tests' encoders, which are 32 wide and at most 64 inside: in
# each of 2 layers four products, attention and the second feed-forward product; a convolution;
# embeddings and a head.
ENCODER_TERMS = 2 * (4 * 32 + 8 + 18 + 64) + 3 * 32 + 3 * 32

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

# DeBERTa-v2 with the options of its xxlarge model.
RELATIVE = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}
