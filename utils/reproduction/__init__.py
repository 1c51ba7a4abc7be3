"""What utils/reproduce.py is made of: the recipes of both trees, their runs, and the report."""
