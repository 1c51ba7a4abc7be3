"""The pictures of the documentation: what utils/draw_pictures.py draws."""
