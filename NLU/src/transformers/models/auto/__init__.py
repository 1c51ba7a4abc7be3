"""The Auto classes, which choose a class by a checkpoint's model type."""
