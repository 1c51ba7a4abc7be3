"""Fine-tuning from the command line: what the tasks' scripts in examples/ share.

arguments.py has the flags, adapted_model.py makes the model and what it is adapted by, data_sets.py
reads files and data sets of the hub, script.py does what the flags ask for.
"""
