"""Chairlift's HTTP server and its command line."""

__version__ = "0.1.0"
