"""Modules of utils/reproduce.py and utils/ablations.py: recipes, runs, the study, and reports."""
