"""Readers of GLUE's files."""

from .glue import (
    GLUE_TASKS,
    GlueTask,
    download_command,
    glue_output_modes,
    glue_processors,
    glue_table,
    glue_task,
    glue_tasks_num_labels,
    load_glue_split,
    similar_glue_task,
)
from .utils import DataProcessor, InputExample, InputFeatures

__all__ = [
    "GLUE_TASKS",
    "DataProcessor",
    "GlueTask",
    "InputExample",
    "InputFeatures",
    "download_command",
    "glue_output_modes",
    "glue_processors",
    "glue_table",
    "glue_task",
    "glue_tasks_num_labels",
    "load_glue_split",
    "similar_glue_task",
]
