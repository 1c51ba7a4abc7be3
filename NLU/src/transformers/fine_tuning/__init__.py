"""Fine-tuning from the command line: the code that the scripts in examples/ share.

arguments.py has the flags, adapted_model.py makes the model with its adapters, data_sets.py reads
data from files or the hub, and script.py runs what the flags ask for. Each task's data is checked
in a file of its own: labeled_texts.py, tagged_words.py, questions.py and choices.py. What else is
checked before a run: starting_point.py, whether the data fits a model that is already trained;
lengths.py, how many tokens its rows have; folders.py, that nothing is overwritten.
"""
