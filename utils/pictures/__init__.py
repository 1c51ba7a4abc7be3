"""The documentation's pictures that utils/draw_pictures.py draws."""
