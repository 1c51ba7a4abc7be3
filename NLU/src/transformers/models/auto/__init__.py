"""Which class a checkpoint's model type calls for."""
