"""GLUE data: processors, metrics, collators."""
