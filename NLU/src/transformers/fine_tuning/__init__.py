"""Fine-tuning from the command line: the code that the scripts in examples/ share.

arguments.py has the flags, adapted_model.py makes the model with its adapters, data_sets.py reads
data from files or the hub, and script.py runs what the flags ask for.
"""
