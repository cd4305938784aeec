"""The demo: a small target model of our own, trained on the Python 3.11 documentation, and what the demo run needs."""
